"""Runs the command line in this process, and stands in for a terminal."""

from __future__ import annotations

import io
import re
import shlex
from pathlib import Path

from typer.testing import CliRunner, Result

from unishard.cli import app

ROOT = Path(__file__).resolve().parents[2]
TINY = str(ROOT / "configs" / "llama_tiny.yaml")


def run(*arguments: str, answers: str | None = None) -> Result:
    return CliRunner().invoke(app, arguments, prog_name="unishard", input=answers)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def plain(shown: str) -> str:
    return re.sub(r"\x1b\[\d*(?:;\d+)*m", "", shown)


def one_line(text: str) -> str:
    """A text without its line breaks."""
    return " ".join(text.split())


def pasted(text: str) -> list[list[str]]:
    """The words of each `unishard translate` in a text, as a shell takes them."""
    lines = text.replace("\\\n", "").splitlines()
    return [shlex.split(line) for line in lines if line.strip().startswith("unishard translate ")]
