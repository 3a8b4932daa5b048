"""From what ranks gave to what the page says: medians of paired ratios, whether all trained the same, machine, versions
and date. Pure.
"""

from __future__ import annotations

import datetime
import math
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.peers.cell import Cell
from unishard.contract.tolerances import TOLERANCES

Json = dict[str, Any]


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Json:
    """The median of the ratios of steps of the same round, with its 95 % interval (order statistics, no distribution
    assumed).
    """
    ratios = sorted(own / other for own, other in zip(ours, theirs, strict=True))
    margin = 1.96 * math.sqrt(len(ratios)) / 2
    low, high = (ratios[min(len(ratios) - 1, max(0, round(len(ratios) / 2 + sign * margin)))] for sign in (-1, 1))
    return {"ratio": statistics.median(ratios), "low": low, "high": high, "pairs": len(ratios)}


def deviation(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference of two curves; infinite where a loss is not finite."""
    apart = [abs(own - other) / abs(other) for own, other in zip(losses, reference, strict=True)]
    return max(each if math.isfinite(each) else math.inf for each in apart)


def cell_result(cell: Cell, parameters: int, theory: int, ranks: Sequence[Mapping[str, Any]]) -> Json:
    """One cell from the answers of its ranks: candidates by name, each with its steps, losses, counts and memory."""
    bound, first = TOLERANCES[cell.precision].losses, ranks[0]
    reference = next(iter(first))
    sides: Json = {}
    for name, side in first.items():
        far = max(deviation(rank[name].losses, rank[reference].losses) for rank in ranks)
        sides[name] = {
            "seconds": statistics.median(side.seconds),
            "deviation": far,
            "void": not far <= bound,
            "collectives": side.counts.collectives,
            "nbytes": side.counts.nbytes,
            "peak": max(rank[name].held + rank[name].counts.peak for rank in ranks),
        }
    ratios = (
        {name: paired(first["unishard"].seconds, first[name].seconds) for name in first if name != "unishard"}
        if "unishard" in first
        else {}
    )
    return {
        **cell._asdict(),
        "parameters": parameters,
        "tokens": cell.size.batch * cell.size.length * cell.size.accumulation,
        "steps": len(first[reference].losses),
        "bound": bound,
        "theory": theory,
        "candidates": sides,
        "ratios": ratios,
    }


def start_result(cell: Cell, found: Mapping[str, Sequence[Any]]) -> Json:
    """Medians of the starts of a cell."""
    sides = {
        name: {each: statistics.median(getattr(start, each) for start in starts) for each in ("wall", "cpu")}
        for name, starts in found.items()
    }
    return {**cell._asdict(), "starts": len(next(iter(found.values()))), "candidates": sides}


def machine(world: int) -> Json:
    """Where and with what it was measured."""
    packages = ("torch", "deepspeed", "accelerate", "transformers", "unishard")
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
        "ranks": world,
        "load": round(os.getloadavg()[0], 2),
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or "CPU")
