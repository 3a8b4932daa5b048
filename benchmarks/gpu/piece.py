"""Runs one piece in this process: prints its checks and its verdict, writes its JSON file, and exits with 1 if it
fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from benchmarks.gpu.pieces import PIECES, Piece
from benchmarks.gpu.report import Report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("piece", choices=[piece.name for piece in PIECES])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu-out"), help="folder for the JSON files")
    given = parser.parse_args(arguments)
    set_environment(given.device)
    piece = next(piece for piece in PIECES if piece.name == given.piece)
    return run_piece(piece, given.device, given.out)


def set_environment(device: str) -> None:
    """Before torch is imported, here and in every process that this one starts."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        # Without it cuBLAS may give other bits each time (torch, "Reproducibility").
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # A piece has several processes at a time, whose threads would wait for each other.
        os.environ.setdefault("OMP_NUM_THREADS", "2")


def run_piece(piece: Piece, device: str, out: Path) -> int:
    """Run it, whatever it raises, and leave its JSON file."""
    print(f"{piece.name} on {device}: {piece.about}", flush=True)
    report = Report(piece.name, device, folder=out)
    try:
        report.hardware = hardware_of(device)
        import_module(f"benchmarks.gpu.{piece.module}").run(report, *piece.arguments)
    except BaseException as error:
        report.check("ran to its end", False, "".join(traceback.format_exception(error)).rstrip())
        if not isinstance(error, Exception):
            raise
    report.ended = True
    path = report.write(out)
    print(f"{piece.name} on {device}: {report.verdict} ({path})", flush=True)
    return 1 if report.verdict == "fail" else 0


def hardware_of(device: str) -> str:
    """The card's name.

    Raises:
        RuntimeError: A GPU is asked for, and torch sees none.
    """
    import torch

    if device == "cpu":
        return f"CPU, {os.cpu_count()} cores"
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device; --device cpu runs the CPU form")
    return torch.cuda.get_device_name(0)


if __name__ == "__main__":
    sys.exit(main())
