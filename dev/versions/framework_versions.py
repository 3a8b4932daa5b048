"""Runs the tests of `unishard.integrations` on other versions of the frameworks; writes docs/versions/frameworks.json
and docs/versions.md.

    python -m dev.versions.framework_versions                             # all of VERSIONS, 20 minutes
    python -m dev.versions.framework_versions accelerate==1.8.0 --path DIR

A version that is not installed is put in front of the installed packages, without its dependencies, of which Ray needs
jsonschema; `--path` names a folder that has it already.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from dev.versions.frameworks import TESTS, VERSIONS, read
from dev.versions.page import write
from dev.versions.sets import ROOT

_SECONDS = 3600


def main(arguments: Sequence[str]) -> int:
    """Run what the command line asks for; 1 when anything was wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("packages", nargs="*", default=VERSIONS, help="such as accelerate==1.8.0")
    parser.add_argument("--path", action="append", default=[], help="folders that have the packages")
    given = parser.parse_args(arguments)
    folder, wrong = ROOT / "docs/versions", 0
    for package in given.packages:
        row = measure(package, given.path)
        print(row)  # noqa: T201
        kept = [each for each in read(folder) if (each["framework"], each["version"]) != tuple(package.split("=="))]
        text = json.dumps([*kept, row], indent=1) + "\n"
        (folder / "frameworks.json").write_text(text, encoding="utf-8")
        write(ROOT / "docs")
        wrong += bool(row["wrong"])
    return int(wrong > 0)


def measure(package: str, folders: Sequence[str]) -> dict[str, Any]:
    """The tests of one version."""
    name, _, wanted = package.partition("==")
    begun = time.monotonic()
    with overlay(package, folders) as path:
        environ = os.environ | {"PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])}
        told = subprocess.run(
            [sys.executable, "-c", f"from importlib.metadata import version as v; print(v({name!r}), v('torch'))"],
            env=environ, capture_output=True, text=True, check=True,
        ).stdout.split()  # fmt: skip
        if told[0] != wanted:
            raise SystemExit(f"{package} is asked for, {told[0]} is installed")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS[name]],
            cwd=ROOT, env=environ, capture_output=True, text=True, timeout=_SECONDS,
        )  # fmt: skip
    row: dict[str, Any] = {"framework": name, "version": wanted, "torch": told[1].partition("+")[0]}
    return row | counts(done.stdout) | {
        "date": datetime.now().date().isoformat(), "seconds": round(time.monotonic() - begun)
    }  # fmt: skip


def counts(output: str) -> dict[str, Any]:
    """How many tests passed, and what was wrong, from the last lines of pytest."""
    last = output.strip().splitlines()[-1] if output.strip() else ""
    passed = re.search(r"(\d+) passed", last)
    wrong = re.search(r"\d+ (failed|error|skipped)", last)
    return {"passed": int(passed[1]) if passed else 0, "wrong": (last or "no result") if wrong or not passed else ""}


@contextmanager
def overlay(package: str, folders: Sequence[str]) -> Iterator[list[str]]:
    """Folders for PYTHONPATH with this version, empty where it is installed."""
    name, _, wanted = package.partition("==")
    if folders or _installed(name) == wanted:
        yield [*folders]
        return
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as folder:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, package]
        subprocess.run(pip, check=True)
        yield [folder]


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
