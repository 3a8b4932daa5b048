"""The versions of frameworks that `framework_versions.py` runs, and what came of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from dev.versions.sets import ROOT

__all__ = ["TESTS", "VERSIONS", "pinned", "read"]

TESTS = {
    "accelerate": ("tests/integrations/test_on_accelerate.py", "tests/integrations/test_more_on_accelerate.py"),
    "transformers": ("tests/integrations/test_on_trainer.py",),
    "trl": ("tests/integrations/test_on_trl.py",),
    "lightning": ("tests/integrations/test_on_lightning.py", "tests/integrations/test_on_fabric.py"),
    "ray": ("tests/ranks/test_ray_train.py",),
}
VERSIONS = ("accelerate==1.8.0", "lightning==2.6.0", "ray==2.51.0")
"""The floors of pyproject.toml that are older than what constraints.txt pins, with which the whole suite runs."""


def read(folder: Path) -> list[dict[str, Any]]:
    """The results, in the order of TESTS and of their versions."""
    path = folder / "frameworks.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    return sorted(found, key=lambda row: ([*TESTS].index(row["framework"]), _numbers(row["version"])))


def pinned() -> str:
    """The frameworks that constraints.txt pins, in words."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pins = dict(re.findall(r"^(\w+)==(\S+)$", text, re.MULTILINE))
    return ", ".join(f"{name} {pins[name]}" for name in TESTS if name in pins)


def _numbers(text: str) -> list[int]:
    return [int(each) for each in re.findall(r"\d+", text)]
