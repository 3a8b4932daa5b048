"""Installs from a folder of wheels what this machine's Python lacks, into a folder of its own. No network; standard
library only.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple


class Wheel(NamedTuple):
    """A file name such as `pydantic_core-2.50.4-cp312-cp312-manylinux_2_17_x86_64.whl`, taken apart."""

    path: Path
    name: str
    version: str
    python: str
    """Tags such as `py3` or `cp312`, joined with dots."""


def parse(path: Path) -> Wheel:
    parts = path.stem.split("-")
    return Wheel(path, re.sub(r"[-_.]+", "-", parts[0]).lower(), parts[1], parts[-3])


def needed(wheels: Iterable[Wheel], installed: Callable[[str], str | None], *, tag: str) -> list[Wheel]:
    """Those whose package is missing here or older, and that this Python can load.

    Args:
        wheels: What is at hand.
        installed: The version of a package here; None where there is none.
        tag: Of this Python, such as `cp312`.
    """
    found = []
    for wheel in wheels:
        here = installed(wheel.name)
        if loads(wheel, tag) and (here is None or numbers(here) < numbers(wheel.version)):
            found.append(wheel)
    return found


def loads(wheel: Wheel, tag: str) -> bool:
    """Whether a Python of this tag can load it; of `abi3` wheels any from theirs on."""
    if "-abi3-" in wheel.path.name:
        return int(wheel.python.removeprefix("cp3")) <= int(tag.removeprefix("cp3"))
    return bool({"py3", tag} & set(wheel.python.split(".")))


def numbers(text: str) -> tuple[int, ...]:
    """The release part of a version: `2.11.0+cu130` gives (2, 11, 0)."""
    return tuple(int(part) for part in re.match(r"[\d.]*", text)[0].strip(".").split(".") if part)


def install(wheels: Path, target: Path) -> list[Wheel]:
    """Install what is needed into a new folder, for PYTHONPATH. Returns what was installed."""
    shutil.rmtree(target, ignore_errors=True)
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    chosen = needed([parse(path) for path in sorted(wheels.glob("*.whl"))], installed_version, tag=tag)
    if chosen:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
            "--no-compile",
            "--no-cache-dir",
        ]
        subprocess.run([*pip, "--target", str(target), *(str(wheel.path) for wheel in chosen)], check=True)
    return chosen


def installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
