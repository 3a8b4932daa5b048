"""Where and with what something is measured, as results keep it and pages say it."""

from __future__ import annotations

import datetime
import os
import platform
from importlib.metadata import version
from pathlib import Path

from dev.measured import Json

__all__ = ["about", "machine"]


def machine(world: int) -> Json:
    """Of this moment."""
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


def about(machine: Json) -> str:
    """In a sentence."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    cores, load = machine["cores"], machine["load"]
    return (
        f"Measured on {machine['date']}: {machine['ranks']} ranks on {cores} cores ({machine['cpu']}, "
        f"{machine['system']}), gloo, one thread a rank, load {load} before; Python {machine['python']}, {versions}."
    )
