from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from running import TINY, Terminal, run

import unishard
from unishard.cli import _COMMANDS, _REPLACED


def test_usage_errors_are_short() -> None:
    for arguments in (
        ["translate", TINY],
        ["explain", TINY, "--world-size", "0"],
        ["translte", TINY],
        ["translate", TINY, "--to", "unishard", "--report", "xml"],
    ):
        result = run(*arguments)
        assert result.exit_code == 2
        assert len(result.stderr.splitlines()) <= 5
        assert "Traceback" not in result.stderr


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("unishard.config.loading.read", broken)
    assert isinstance(run("explain", TINY).exception, KeyError)


def test_version() -> None:
    assert run("--version").stdout == f"unishard {unishard.__version__}\n"


def test_a_command_of_an_earlier_version_names_what_replaces_it() -> None:
    for old, new in _REPLACED.items():
        result = run(old, "anything")
        assert result.exit_code == 2
        assert result.stderr.splitlines()[-1] == f"Error: No such command {old!r}. Use {new}."
        assert new.partition(" ")[0] in (*_COMMANDS, "make")
        assert old not in _COMMANDS


def test_what_the_operating_system_refuses_is_one_message(config: Path) -> None:
    config.write_text("backend: fsdp\n", encoding="utf-8")
    for name in ("file", "train.py"):
        Path(name).touch()
    result = run("compare", str(config), "--out", "file", "train.py")
    (message,) = [line for line in result.stderr.splitlines() if "cannot be opened" in line]
    assert result.exit_code == 2
    assert message.startswith(str(config.with_name("file")))
    assert message.endswith(": cannot be opened (Not a directory); name another file or directory")


def test_an_error_of_the_operating_system_that_is_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr("unishard.config.loading.read", broken)
    assert isinstance(run("explain", TINY).exception, OSError)


def test_a_terminal_gets_a_drawn_table() -> None:
    from unishard.cli.tables import show

    rows = [("training.seed", "3"), ("sharding.units", "[not markup]")]
    screen, pipe = Terminal(), io.StringIO()
    show(("field", "value"), rows, screen)
    show(("field", "value"), rows, pipe)
    assert "┃" in screen.getvalue()
    assert "[not markup]" in screen.getvalue()
    assert pipe.getvalue() == "field           value\ntraining.seed   3\nsharding.units  [not markup]\n"


@pytest.mark.parametrize("command", [["-m", "unishard"], ["-c", "from unishard.cli import main; main()"]])
def test_as_a_process(command: list[str], config: Path) -> None:
    config.write_text("lr: 1\n")
    result = subprocess.run(
        [sys.executable, *command, "explain", "c.yaml"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=config.parent,
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "c.yaml:1: lr: unknown field; did you mean 'optimizer.lr'?\n"


def test_nothing_is_searched_for_garbage_at_the_end(config: Path) -> None:
    """Python would search all objects twice, which takes a fifth of a translation."""
    code = (
        "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 0)); from unishard.cli import "
        "main; main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stdout) == (0, f"unishard {unishard.__version__}\nTrue\n")


@pytest.mark.parametrize(
    "command", ["--version", "schema", f"explain '{TINY}'", f"translate '{TINY}' --to unishard --report none"]
)
def test_output_that_nobody_reads_is_quiet(command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = subprocess.run(
            f"'{sys.executable}' -m unishard {command}",
            shell=True,
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writer)
    assert (result.returncode, result.stderr) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is always full")
@pytest.mark.parametrize(
    "command", ["--version", "schema", f"explain '{TINY}'", f"translate '{TINY}' --to unishard --report none"]
)
def test_output_that_does_not_fit_is_one_message(command: str) -> None:
    result = subprocess.run(
        f"'{sys.executable}' -m unishard {command} > /dev/full",
        shell=True,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 1
    assert (
        result.stderr
        == "cannot write the output (No space left on device); free some space, or write it to another disk\n"
    )


def test_launch_without_a_config_says_what_to_write() -> None:
    result = run("launch", "train.py", "--epochs", "3")
    assert result.exit_code == 2
    assert "train.py is the script; write the config before it: cfg.yaml train.py" in " ".join(result.output.split())
