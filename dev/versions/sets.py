"""The version sets that `make versions` runs, one row each. To add a version, add a row."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "SETS", "VersionSet", "floors"]

ROOT = Path(__file__).resolve().parents[2]
PIECES = ("doctor", "cells", "resuming", "export")
"""What is run in every environment; see `pieces.py`."""
FIRST_STEPS = ("readme", "demo")
"""What a new user runs first."""


@dataclass(frozen=True)
class VersionSet:
    """One environment: `pip install '.[all]'` with these pins, on this Python."""

    name: str
    python: str
    pins: tuple[str, ...] = ()
    pieces: tuple[str, ...] = PIECES

    @property
    def torch_first(self) -> tuple[str, ...]:
        """What is installed before everything else, so that a package that builds against torch finds the pinned
        one."""
        return tuple(pin for pin in self.pins if re.match(r"torch\b", pin))


def floors() -> tuple[str, ...]:
    """Every dependency of the extra `all`, at the oldest version that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (everything,) = project["optional-dependencies"]["all"]
    named = everything.partition("[")[2].rstrip("]").split(",")
    extras = [project["optional-dependencies"][name] for name in named]
    found = (text for texts in (project["dependencies"], *extras) for text in texts)
    return tuple(text.replace(">=", "==") for text in found if not text.startswith("unishard["))


SETS = (
    # All with DeepSpeed 0.19.8, the oldest whose numbers are right and the newest that there is.
    # What GPU machines run today.
    VersionSet("torch-2.11", "3.12", ("torch==2.11.*", "transformers==5.17.*")),
    VersionSet("torch-2.12", "3.11", ("torch==2.12.*",)),
    VersionSet("torch-2.13", "3.11", ("torch==2.13.*",)),
    VersionSet("torch-2.14", "3.12", ("torch==2.14.*",)),
    VersionSet("torch-2.15", "3.13", ("torch==2.15.*",)),
    VersionSet("floors", "3.11", floors(), (*PIECES, *FIRST_STEPS)),
    # No pins at all: what `pip install '.[all]'` gives a new user today.
    VersionSet("newest", "3.13", (), (*PIECES, *FIRST_STEPS)),
)
