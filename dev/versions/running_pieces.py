"""What is run in an environment, a fresh process each, and what came of it as JSON."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dev.versions.environments import last_lines, run
from dev.versions.sets import ROOT

__all__ = ["run_piece"]

PIECES = Path(__file__).resolve().parent / "pieces"
_SECONDS = {"doctor": 300, "cells": 1800, "resuming": 1200, "export": 900, "readme": 600, "demo": 1200}


def run_piece(name: str, python: Path) -> dict[str, Any]:
    """Run one piece in an empty folder outside the checkout.

    Returns:
        `seconds`, `wrong` (empty where all is well), and what the piece found out under `found`.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as folder:
        try:
            found, wrong = _RUNS.get(name, _script)(name, python, Path(folder))
        except (ValueError, OSError) as error:  # it left no result, or none that can be read
            found, wrong = None, f"{type(error).__name__}: {error}"
    return {"seconds": round(time.monotonic() - start), "wrong": wrong, "found": found}


def _script(name: str, python: Path, folder: Path) -> tuple[Any, str]:
    out = folder / "found.json"
    done = run([python, PIECES / f"{name}.py", out], timeout=_SECONDS[name], cwd=folder)
    if not out.is_file():
        return None, last_lines(done.stdout)
    return json.loads(out.read_text(encoding="utf-8")), ""


def _doctor(name: str, python: Path, folder: Path) -> tuple[Any, str]:
    done = run([python, "-m", "unishard", "doctor", "--json"], timeout=_SECONDS[name], cwd=folder)
    if not done.stdout.startswith("{"):
        return None, last_lines(done.stdout)
    report = json.loads(done.stdout)
    failed = [f"{check['name']}: {check['found']}" for check in report["checks"] if check["status"] == "fail"]
    probes = {
        check["name"].removeprefix("probe "): check["missing"] for check in report["checks"] if "missing" in check
    }
    return {"versions": report["versions"], "counts": report["counts"], "probes": probes}, "; ".join(failed)


def _readme(name: str, python: Path, folder: Path) -> tuple[Any, str]:
    """README's first program, as a user would run it."""
    (program, *_) = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    (folder / "train.py").write_text(program, encoding="utf-8")
    done = run([python, "train.py"], timeout=_SECONDS[name], cwd=folder)
    return None, last_lines(done.stdout) if done.returncode else ""


def _demo(name: str, python: Path, folder: Path) -> tuple[Any, str]:
    done = run([python, ROOT / "examples" / "demo.py", "--steps", "20"], timeout=_SECONDS[name], cwd=folder)
    gap = re.search(r"largest difference of the two curves: (\S+)", done.stdout)
    return {"largest difference": float(gap[1])} if gap else None, last_lines(done.stdout) if done.returncode else ""


_RUNS: dict[str, Callable[[str, Path, Path], tuple[Any, str]]] = {"doctor": _doctor, "readme": _readme, "demo": _demo}
