"""What a piece found: checks with a verdict each, printed as they come and written as one JSON file."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

Verdict = Literal["pass", "fail", "unsupported", "needs CUDA"]
"""`unsupported`: the versions at hand cannot do it, and the detail says which and why. `needs CUDA`: not measured in
the CPU form."""

_PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "lightning", "numpy", "pydantic")


class Check(NamedTuple):
    """One statement that holds or does not."""

    name: str
    verdict: Verdict
    detail: str
    figures: dict[str, Any]


def verdict_of(checks: Iterable[Check]) -> Verdict:
    """Of a piece: it fails with one check, and has proved nothing if it has none that passed."""
    verdicts = [check.verdict for check in checks]
    for verdict in ("fail", "pass", "unsupported", "needs CUDA"):
        if verdict in verdicts:
            return verdict
    return "fail"


def path_of(folder: Path, piece: str, device: str) -> Path:
    return folder / f"{piece}-{device}.json"


def read(folder: Path) -> list[dict[str, Any]]:
    """The reports in a folder, of either device."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*-*.json"))]


class Report:
    """Collects the checks of one piece."""

    def __init__(self, piece: str, device: str, *, quiet: bool = False) -> None:
        self.piece = piece
        self.device = device
        """`cuda` or `cpu`."""
        self.checks: list[Check] = []
        self._quiet = quiet
        self._start = time.monotonic()

    @property
    def verdict(self) -> Verdict:
        """Of the checks so far."""
        return verdict_of(self.checks)

    def check(self, name: str, holds: bool, detail: str = "", **figures: Any) -> bool:
        """Record whether something holds."""
        self._add(Check(name, "pass" if holds else "fail", detail, figures))
        return holds

    def unsupported(self, name: str, why: str, **figures: Any) -> None:
        """Record what these versions cannot do."""
        self._add(Check(name, "unsupported", why, figures))

    def needs_cuda(self, name: str, detail: str = "", **figures: Any) -> None:
        """Record what the CPU form cannot measure."""
        self._add(Check(name, "needs CUDA", detail, figures))

    def write(self, folder: Path, hardware: str = "") -> Path:
        """Write the JSON file."""
        folder.mkdir(parents=True, exist_ok=True)
        path = path_of(folder, self.piece, self.device)
        answer = {
            "piece": self.piece,
            "device": self.device,
            "hardware": hardware,
            "verdict": self.verdict,
            "seconds": round(time.monotonic() - self._start, 1),
            "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
            "checks": [check._asdict() for check in self.checks],
        }
        path.write_text(json.dumps(answer, indent=1) + "\n")
        return path

    def _add(self, check: Check) -> None:
        self.checks.append(check)
        if not self._quiet:
            said = f"{check.name}: {check.detail}" if check.detail else check.name
            print(f"  {check.verdict:11} {self.piece}: {said}", flush=True)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
