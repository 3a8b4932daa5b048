"""On terminals of 80 and 100 columns no line breaks inside a word, in any command; elsewhere no line breaks at all."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from running import ROOT, Terminal, plain, run

from unishard.checkpoint.manifest import Manifest, ModelRecord, TensorFacts
from unishard.cli import _COMMANDS, _built, app

GROUPS = {name: list(_built(name).commands) for name in _COMMANDS if hasattr(_built(name), "commands")}
HELP = [[], *([name] for name in _COMMANDS), *([group, name] for group, names in GROUPS.items() for name in names)]
LONG = "a_rather_long_name_of_a_file_in_a_deep_folder/" * 2
COMMANDS = [
    ["explain", "configs/llama_tiny.yaml", "--all"],
    ["explain", "configs/zero2_bf16.yaml"],
    ["explain", "configs/llama_hybrid.yaml", "fsdp"],
    ["explain", "bad.yaml"],
    ["check", "approximate.yaml"],
    ["check", "bad.yaml"],
    ["check", "refused.yaml", "--world-size", "7"],
    ["translate", "examples/configs/ds_zero2.json", "--to", "accelerate", "--report", "full"],
    ["translate", "examples/configs/training_arguments.yaml", "--to", "deepspeed"],
    ["diff", "examples/configs/ds_zero2.json", "examples/configs/lightning_cli.yaml"],
    ["translate", ".", "--to", "unishard"],
    ["init", "--force", "-o", "out.yaml"],
    ["schema", "-o", "s.json"],
    ["checkpoint", "list", "runs"],
    ["checkpoint", "inspect", "runs", "--tensors"],
    ["checkpoint", "verify", "runs"],
    ["checkpoint", "list", "nowhere"],
]
DATA = re.compile(r"[┏━┳┓┃┡╇┩│└─┴┘]")


@pytest.fixture
def project(config: Path) -> Path:
    """A folder with configs and checkpoints that have long names and messages."""
    for name in ("configs", "examples"):
        Path(name).symlink_to(ROOT / name)
    Path("bad.yaml").write_text("sharding: {stratgy: full_shard}\nprecision: {compute: bf17}\nnative: {fsdp: 3}\n")
    quantized = "native: {deepspeed: {zero_optimization: {zero_quantized_weights: true}}}\n"
    Path("approximate.yaml").write_text(f"backend: deepspeed\n{quantized}")
    Path("refused.yaml").write_text(
        f"precision: {{compute: bf16, accumulate: bf16}}\ntraining: {{global_batch_size: 9}}\ncheckpoint: {LONG}\n"
    )
    Path(LONG).mkdir(parents=True)
    (Path(LONG) / "ds.json").write_text((ROOT / "examples/configs/ds_zero2.json").read_text())
    folder = Path("runs/step-00000004")
    folder.mkdir(parents=True)
    record = TensorFacts(shape=[64, 64], dtype="float32", hash="0" * 16)
    tensors = {f"model.layers.{at}.mlp.down_projection.weight": record for at in (0, 1)}
    facts = Manifest(
        written="2026-01-01T00:00:00+00:00",
        versions={"torch": "2.13.0", "unishard": "0.1.0", "transformers": "5.0.0"},
        step=4,
        world_size=2,
        model=ModelRecord(class_name="LlamaForCausalLM", fingerprint="0123456789abcdef", numel=8192),
        files={},
        tensors=tensors,
    )
    (folder / "manifest.json").write_text(facts.model_dump_json())
    return config.parent


def on_terminal(monkeypatch: pytest.MonkeyPatch, columns: int, *arguments: str) -> str:
    """What a command writes to a terminal, on both streams."""
    screen = Terminal()
    with monkeypatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        patch.setenv("NO_COLOR", "1")
        patch.setenv("TERM", "xterm")
        patch.setattr(sys, "stdout", screen)
        patch.setattr(sys, "stderr", screen)
        with pytest.raises(SystemExit):
            app(list(arguments), prog_name="unishard")
    return plain(screen.getvalue())


def check_words(wide: str, shown: str, columns: int, *, layout: set[str]) -> None:
    """Check that each word of the output is whole on the terminal, and that lines fit, but for words that are longer
    than a line."""
    words = {word for line in shown.splitlines() for word in DATA.sub(" ", line).split()}
    broken = [word for word in wide.split() if word not in layout and not any(word in other for other in words)]
    assert broken == [], shown
    too_long = [
        line
        for line in shown.splitlines()
        if len(line.rstrip()) > columns and len(line.split()) > 1 + line.startswith("  ")
    ]
    assert too_long == []


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_output(project: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], columns: int) -> None:
    result = run(*arguments)
    document = "--to" in arguments and arguments[1] != "."  # what goes to a file is not prose, and stays as it is
    wide = result.stderr if document else result.output
    header = {
        "where",
        "key",
        "=",
        "value",
        "fit",
        "becomes",
        "note",
        "field",
        "from",
        "config",
        "format",
        "fact",
        "backend",
        "step",
        "strategy",
        "kind",
    }
    check_words(
        wide, on_terminal(monkeypatch, columns, *arguments), 10**6 if document else columns, layout=header | set("AB")
    )


@pytest.mark.parametrize("columns", [80, 100])
def test_doctor(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    from unishard.tools import doctor

    long = (
        "cannot be imported: ImportError: "
        "/opt/conda/lib/python3.11/site-packages/deepspeed/ops/async_io.cpython-311-x86_64-linux-gnu.so"
    )
    checks = [
        doctor.Check(
            "deepspeed", doctor.Status.WARN, long, "pip install --force-reinstall --no-cache-dir 'unishard[deepspeed]'"
        )
    ]
    monkeypatch.setattr(doctor, "examine", lambda *given: iter(checks))
    check_words(
        run("doctor").output, on_terminal(monkeypatch, columns, "doctor"), columns, layout={"what", "status", "found"}
    )


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("arguments", HELP, ids=lambda arguments: " ".join(arguments) or "unishard")
def test_help(monkeypatch: pytest.MonkeyPatch, arguments: list[str], columns: int) -> None:
    wide, shown = (on_terminal(monkeypatch, width, *arguments, "--help") for width in (10_000, columns))
    check_words(wide, shown, columns, layout=set())
    if (arguments and arguments[0] not in GROUPS | {"": []}) or len(arguments) == 2:
        assert f"Example: unishard {' '.join(arguments)}" in " ".join(shown.split())


def test_one_line_stays_one_line_elsewhere(project: Path) -> None:
    for line in run("check", "refused.yaml", "--world-size", "7").stderr.splitlines():
        assert line.startswith("refused.yaml:")
    assert "\n" not in run("checkpoint", "list", "nowhere").stderr.rstrip("\n")


def test_words_that_are_longer_than_a_line_stay_whole() -> None:
    from unishard.cli.tables import show, show_blocks

    screen = Terminal()
    show(("file", "note"), [("x" * 300, "short")], screen)
    show_blocks([("heading", [("label", "y" * 300)])], screen)
    assert {"x" * 300, "y" * 300} <= set(plain(screen.getvalue()).split())
    pipe = io.StringIO()
    show(("file", "note"), [("x" * 300, "short " * 40)], pipe)
    assert len(pipe.getvalue().splitlines()) == 2


def test_on_a_real_terminal(tmp_path: Path) -> None:
    """COLUMNS is not set there: the width is the terminal's own."""
    import fcntl
    import os
    import pty
    import struct
    import subprocess
    import termios

    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    environ = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "unishard", "check", "c.yaml"]
    (tmp_path / "c.yaml").write_text("precision: {compute: bf16, accumulate: bf16}\n")
    with subprocess.Popen(
        command, stdout=child, stderr=child, stdin=child, cwd=tmp_path, env=environ | {"PYTHONPATH": str(ROOT)}
    ) as process:
        assert process.wait(60) == 1
    os.close(child)
    shown = os.read(parent, 65536).decode()
    os.close(parent)
    assert len(shown.splitlines()) > 2
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.split()[:3] == ["c.yaml:1:", "precision.accumulate:", "'bf16'"]
