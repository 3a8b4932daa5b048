"""No name in a file reaches the terminal as a command: control characters are escaped wherever something is printed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from stored import store
from typer.testing import CliRunner

import unishard
from unishard.cli import app
from unishard.cli import wrapping as tables
from unishard.cli.wrapping import echo
from unishard.contract.training_facts import GroupRecord, OptimizerFacts
from unishard.errors import CheckpointError, ConfigError

NASTY = "w\x1b]0;owned\x07\x1b[2J\x9b1m\r\u202e\u2028\x7f"
"""Sets the title of a terminal and rings it, clears the screen, in both sets of control characters, and reverses the
line."""
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2028\u2029\u2066-\u2069]")
STYLE = re.compile(r"\x1b\[\d*(?:;\d+)*m")
"""What rich writes for a color."""


def ours(folder: Path) -> Path:
    groups = [GroupRecord(names=[NASTY], options={NASTY: NASTY})]
    here = folder / f"root{NASTY}" / "step-00000001"
    tensors = {f"model.{NASTY}\nforged": torch.ones(3), "model.a.weight": torch.ones(2)}
    store(here, tensors, optimizer=OptimizerFacts(class_name=NASTY, groups=groups), norms={NASTY: 1.0})
    return here


def config(folder: Path) -> Path:
    path = folder / f"cfg{NASTY}.yaml"
    path.write_text(
        json.dumps(
            {NASTY + "\nforged": 1, "backend": NASTY, "sharding": {"units": [NASTY]}, "logging": {"project": NASTY}}
        )
    )
    return path


def valid(folder: Path) -> Path:
    path = folder / "valid.yaml"
    path.write_text(
        json.dumps({"sharding": {"units": [NASTY]}, "logging": {"dir": NASTY, "to": ["jsonl"]}, "x-" + NASTY: 1})
    )
    return path


def native(folder: Path) -> Path:
    path = folder / "ds.json"
    path.write_text(
        json.dumps(
            {NASTY: NASTY, "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": NASTY, "params": {"lr": NASTY}}}
        )
    )
    return path


def folder_of(path: Path) -> Path:
    return path.parent


COMMANDS: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "list": (lambda folder: folder_of(ours(folder)), ("checkpoint", "list")),
    "inspect": (ours, ("checkpoint", "inspect", "--tensors")),
    "verify": (ours, ("checkpoint", "verify")),
    "check": (config, ("check",)),
    "explain": (valid, ("explain",)),
    "explain one that is not valid": (config, ("explain",)),
    "translate": (native, ("translate", "--to", "unishard")),
    "translate in Markdown": (native, ("translate", "--to", "unishard", "--report", "markdown")),
    "translate a directory": (lambda folder: folder_of(native(folder)), ("translate", "--to", "unishard")),
    "no file": (lambda folder: folder / f"no{NASTY}.yaml", ("check",)),
    "no checkpoint": (lambda folder: folder / f"no{NASTY}", ("checkpoint", "inspect")),
}


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("name", COMMANDS)
def test_no_control_character_is_printed(
    name: str, terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out, command = COMMANDS[name]
    if terminal:
        monkeypatch.setattr("typer.testing._NamedTextIOWrapper.isatty", lambda self: True, raising=False)
        monkeypatch.setattr("unishard.cli.checkpoint.bar", lambda what, total: nullcontext(lambda done: None))
    result = CliRunner().invoke(app, [*command, str(lay_out(tmp_path))], prog_name="unishard")
    shown = STYLE.sub("", result.output)
    assert shown
    assert "w\\u001b" in shown or name in ("list", "translate a directory")
    assert not CONTROL.search(shown), ascii(shown)
    assert not [line for line in shown.splitlines() if line.lstrip().startswith("forged")]


def test_json_says_the_names_as_they_are(tmp_path: Path) -> None:
    said = (
        CliRunner()
        .invoke(app, ["checkpoint", "inspect", "--json", "--tensors", str(ours(tmp_path))], prog_name="unishard")
        .stdout
    )
    assert not CONTROL.search(said.replace("\x7f", ""))  # JSON escapes all but this one, which no terminal obeys
    assert f"model.{NASTY}\nforged" in json.loads(said)["tensors"]


def test_an_uncaught_error_is_printable_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        unishard.load(config(tmp_path))
    assert not CONTROL.search(str(raised.value).replace("\n", ""))
    assert not CONTROL.search(str(CheckpointError(NASTY)))


def test_every_command_prints_through_these_functions() -> None:
    folder = Path(tables.__file__).parent
    direct = re.compile(r"typer\.(echo|secho)\(|(?<![\w.])print\(|sys\.std(out|err)\.write\((?!\"\\n\"\))")
    found = [
        path.name
        for path in sorted(folder.glob("*.py"))
        if path.name != "wrapping.py" and direct.search(path.read_text())
    ]
    assert not found, f"{found} print text that is not escaped; use {echo.__module__}"
