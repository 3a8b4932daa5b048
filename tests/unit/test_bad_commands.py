"""Commands that are refused, in one line each: the cases of bad_commands.yaml."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from running import run
from test_cli_plan import FACTORY

CASES = YAML(typ="safe", pure=True).load(Path(__file__).with_name("bad_commands.yaml"))
FILES = {
    "c.yaml": "backend: fsdp\ntraining: {micro_batch_size: 2}\nlaunch: {processes_per_node: 2}\n",
    "ds.json": '{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 2}',
    "train.py": "",
    "factories.py": FACTORY,
    "empty": "{}\n",
    "g": '{"step": 1, "loss": 2.0}\n',
}


@pytest.fixture
def project(config: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the commands name, no programs and an empty cache."""
    for name, text in FILES.items():
        Path(name).write_text(text)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delitem(sys.modules, "factories", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(config.parent))
    return config.parent


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["command"])
def test_it_is_one_line_and_changes_nothing(project: Path, case: dict[str, Any]) -> None:
    result = run(*shlex.split(case["command"]))
    assert result.exit_code == case.get("exit", 1), result.output
    assert case["says"] in result.stderr.splitlines()[-1]
    assert len(result.stderr.splitlines()) == 1
    assert {path.name: path.read_text() for path in project.iterdir()} == FILES
