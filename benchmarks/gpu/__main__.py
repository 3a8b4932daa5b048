"""Runs pieces, each in a process of its own, and sums up. Standard library only: it may have to
install the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.gpu import packages, page
from benchmarks.gpu.pieces import BUDGET, PIECES, Piece
from benchmarks.gpu.report import Report, path_of, read

_ROOT = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description="What one GPU can prove about unishard."
    )
    parser.add_argument(
        "piece", nargs="*", choices=[[], *(piece.name for piece in PIECES)], metavar="piece", help="left out: all"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny sizes, to know that the code runs"
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-out"), help="folder for the JSON files; default: gpu-out")
    parser.add_argument(
        "--wheels", type=Path, default=_ROOT / ".wheels", help="installs from here what is missing; default: .wheels"
    )
    parser.add_argument("--budget", type=int, default=BUDGET, help=f"seconds for all; default: {BUDGET}")
    parser.add_argument(
        "--jobs", type=int, default=1, help="pieces at a time; those that measure run alone; default: 1"
    )
    parser.add_argument("--page", type=Path, help="write the figures into this page")
    parser.add_argument("--list", action="store_true", help="list the pieces and end")
    given = parser.parse_args(arguments)
    chosen = [piece for piece in PIECES if not given.piece or piece.name in given.piece]
    if given.list:
        print("\n".join(f"{piece.name:14} at most {piece.limit} s  {piece.about}" for piece in chosen))
        return 0
    return run(chosen, given.device, given.out, given.wheels, given.budget, given.page, given.jobs)


def run(
    chosen: list[Piece], device: str, out: Path, wheels: Path, budget: int, target: Path | None, jobs: int = 1
) -> int:
    """Run them while the budget lasts; 1 if any fails."""
    out.mkdir(parents=True, exist_ok=True)
    environment, deadline = prepared(out, wheels), time.monotonic() + budget

    def play(piece: Piece) -> None:
        path_of(out, piece.name, device).unlink(missing_ok=True)
        left = int(deadline - time.monotonic())
        why = (
            ended(piece, device, out, environment, min(piece.limit, left))
            if left > 0
            else f"the budget of {budget} s was spent before"
        )
        report = Report.unfinished(piece.name, device, out)
        if not report.ended:
            report.check("ran to its end", False, why)
            report.write(out)

    for some, beside in groups(chosen, jobs):
        with ThreadPoolExecutor(beside) as pool:
            list(pool.map(play, some))
    verdicts = {report["piece"]: report["verdict"] for report in read(out) if report["device"] == device}
    print(f"\non {device}:")
    for piece in chosen:
        print(f"  {verdicts[piece.name]:11} {piece.name}")
    if target is not None:
        page.write(out, target)
    return 1 if any(verdicts[piece.name] == "fail" for piece in chosen) else 0


def groups(chosen: list[Piece], jobs: int) -> list[tuple[list[Piece], int]]:
    """Pieces and how many of them run at a time: first what others do not disturb."""
    if jobs == 1:
        return [(chosen, 1)]
    return [([piece for piece in chosen if not piece.alone], jobs), ([piece for piece in chosen if piece.alone], 1)]


def ended(piece: Piece, device: str, out: Path, environment: dict[str, str], seconds: int) -> str:
    """Run a piece and say how its process ended, in a session of its own so that nothing outlives it."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu.piece",
        piece.name,
        "--device",
        device,
        "--out",
        str(out.resolve()),
    ]
    process = subprocess.Popen(command, cwd=_ROOT, env=environment, start_new_session=True)
    try:
        return f"the process ended with code {process.wait(seconds)} and left no JSON file"
    except subprocess.TimeoutExpired:
        return f"did not end within {seconds} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def prepared(out: Path, wheels: Path) -> dict[str, str]:
    """The environment of the pieces: this checkout, and what had to be installed."""
    site = (out / "site").resolve()
    paths = [str(_ROOT), str(_ROOT / "backends")]
    if wheels.is_dir() and (installed := packages.install(wheels, site)):
        print(
            f"installed into {site}: " + ", ".join(f"{wheel.name} {wheel.version}" for wheel in installed), flush=True
        )
        paths.append(str(site))
    before = os.environ.get("PYTHONPATH")
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([*paths, *([before] if before else [])]),
        "PYTHONUNBUFFERED": "1",
    }


if __name__ == "__main__":
    sys.exit(main())
