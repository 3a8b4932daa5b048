"""What commands print: each section of the pages in this folder is a test in a folder of its own.

A fence with a name is a file, and one of `console` has commands with all that they print, or that without what `...`
stands for; `python` runs a file, in this process. The fences before the first section are part of each. A command that
ends otherwise than with 0 changes no file, and prints on stderr alone but for the differences, the damage or the JSON
that it was asked for.

After a change that is meant, write the output anew and read the difference: `pytest tests/console --bless`.
"""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from transcripts import EXIT, commands, shows
from typer.testing import CliRunner

from unishard.cli import app

HERE = Path(__file__).parent
FENCE = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ENVIRONMENT = {"COLUMNS": "100", "NO_COLOR": "1", "PATH": "/nowhere"}


class Section(NamedTuple):
    page: Path
    title: str
    text: str
    shared: str

    def __str__(self) -> str:
        return f"{self.page.stem}: {self.title}"


def sections() -> list[Section]:
    found = []
    for page in sorted(HERE.glob("*.md")):
        shared, *parts = re.split(r"^(?=## )", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        found += [Section(page, part.splitlines()[0].removeprefix("## "), part, shared) for part in parts]
    return found


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, with the configs and examples of the repository."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name in ("configs", "examples"):
        (folder / name).symlink_to(HERE.parents[1] / name)
    monkeypatch.chdir(folder)
    for name, value in (ENVIRONMENT | {"XDG_CACHE_HOME": str(tmp_path / "cache")}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "factories", raising=False)
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def printed(command: str) -> tuple[int, str]:
    """The exit status of a command, and its output on both streams."""
    program, *words = shlex.split(command, comments=True)
    if program == "cat":
        return 0, "".join(Path(word).read_text() for word in words)
    if program == "python":
        runpy.run_path(words[0])
        return 0, ""
    assert program == "unishard"
    result = CliRunner().invoke(app, words, prog_name="unishard")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    asked = "--json" in words or {"diff", "verify"} & {*words[:2]}
    assert asked or result.exit_code == 0 or not result.stdout, f"{command} fails, and prints on stdout"
    return result.exit_code, result.output


@pytest.mark.parametrize("section", sections(), ids=str)
def test_section(section: Section, project: Path, request: pytest.FixtureRequest) -> None:
    bless, differ = request.config.getoption("--bless"), []

    def play(fence: re.Match[str]) -> str:
        language, name, text = fence.groups()
        if name:
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(text)
            return fence[0]
        assert language == "console"
        lines = []
        for command, shown in commands(text, language):
            before = files(project)
            code, output = printed(command)
            assert code == 0 or files(project) == before, f"{command} ends with {code} and changes files"
            said = EXIT.search(command)
            if code != (int(said[1]) if said else 0) or not shows(output, shown):
                differ.append(f"$ {command}\n{output}ends with {code}")
                shown = [line.rstrip() for line in output.replace(f"{project}", "...").splitlines()]
                command = EXIT.sub("", command).rstrip() + f"  # exits with {code}" * bool(code)
            lines += [f"$ {command}", *shown]
        return "```console\n" + "".join(f"{line}\n" for line in lines) + "```"

    FENCE.sub(play, section.shared)
    blessed = FENCE.sub(play, section.text)
    if bless and differ:
        whole = section.page.read_text(encoding="utf-8")
        section.page.write_text(whole.replace(section.text, blessed), encoding="utf-8")
    assert bless or not differ, "\n\n".join(differ)
