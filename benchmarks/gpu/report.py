"""What a piece found: checks with a verdict each, printed as they come and written as one JSON file."""

from __future__ import annotations

import json
import platform
import threading
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

    def __init__(self, piece: str, device: str, *, folder: Path | None = None, quiet: bool = False) -> None:
        self.piece = piece
        self.device = device
        """`cuda` or `cpu`."""
        self.hardware = ""
        """The card's name."""
        self.checks: list[Check] = []
        self.ended = False
        """Whether the piece ran to its end."""
        self._folder = folder
        """Where each check is written at once: whoever runs the piece may end it."""
        self._quiet = quiet
        self._start = time.monotonic()
        self._lock = threading.Lock()

    @classmethod
    def unfinished(cls, piece: str, device: str, folder: Path) -> Report:
        """The report of a piece whose process is gone, with what it has written."""
        report, path = cls(piece, device), path_of(folder, piece, device)
        if path.exists():
            written = json.loads(path.read_text())
            report.hardware, report.ended = written["hardware"], written["ended"]
            report.checks = [Check(**check) for check in written["checks"]]
            report._start -= written["seconds"]
        return report

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

    def write(self, folder: Path) -> Path:
        """Write the JSON file, whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        path = path_of(folder, self.piece, self.device)
        answer = {
            "piece": self.piece,
            "device": self.device,
            "hardware": self.hardware,
            "ended": self.ended,
            "verdict": self.verdict,
            "seconds": round(time.monotonic() - self._start, 1),
            "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
            "checks": [check._asdict() for check in self.checks],
        }
        part = path.with_suffix(".part")
        part.write_text(json.dumps(answer, indent=1) + "\n")
        part.replace(path)
        return path

    def _add(self, check: Check) -> None:
        with self._lock:
            self.checks.append(check)
            if self._folder is not None:
                self.write(self._folder)
        if not self._quiet:
            said = f"{check.name}: {check.detail}" if check.detail else check.name
            print(f"  {check.verdict:11} {self.piece}: {said}", flush=True)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
