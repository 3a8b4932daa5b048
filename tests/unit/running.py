"""Runs the command line in this process, and stands in for a terminal."""

from __future__ import annotations

import io
import re
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
