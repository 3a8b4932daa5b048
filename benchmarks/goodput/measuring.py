"""Times a save, a save in the background and a resume, and collects what other programs have measured."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.checkpoint import config, evict_from_cache, folder, held, in_turns, measured, sizes, trained
from dev.pages.rows import rows
from unishard.testing import run_ranks

RANKS, STRATEGY = 2, "full_shard"
STARTS = Path(__file__).resolve().parents[1] / "first_step" / "measured.json"
KILLED = "`kill -9`, or killed for lack of memory"
"""The fault of docs/reliability.md whose longest seconds are those until a failure is noticed."""


def times(engine: str, hidden: int, layers: int, rounds: int) -> dict[str, float]:
    """Seconds of what a failure and a save cost on an engine."""
    with tempfile.TemporaryDirectory(prefix="goodput-") as root:
        saved = run_ranks(RANKS, _saved, engine, sizes(hidden, layers), root, rounds, timeout=3600)[0]
    return {"notice": noticed(engine), "start": started(engine), **saved}


def noticed(engine: str) -> float:
    """The longest time from the death of a rank to the end of the last other one, by `make faults`."""
    column = ("fsdp", "deepspeed").index(engine)
    found = [cells[-1].split(" / ")[column] for _, cells in rows("reliability.md") if cells[0] == KILLED and cells[-1]]
    return max(map(float, found))


def started(engine: str) -> float:
    """Seconds to the first step, by `benchmarks.first_step`."""
    for each in json.loads(STARTS.read_text())["starts"]:
        if (each["engine"], each["ranks"], each["name"]) == (engine, RANKS, "unishard"):
            return float(each["together"])
    raise RuntimeError(f"{STARTS} has no start of unishard on {engine} with {RANKS} ranks")


def _saved(engine_name: str, shape: dict[str, Any], root: str, rounds: int) -> dict[str, float]:
    place, found = Path(root), {}
    with trained(config(engine_name, STRATEGY), shape) as engine:
        found["GiB"] = held(engine) / 2**30

        def save() -> Any:
            with folder(place, "saved") as path:
                return measured(lambda: engine.save(path))

        with folder(place, "loaded") as path:
            checkpoint = engine.save(path)

            def load() -> Any:
                evict_from_cache(checkpoint)
                return measured(lambda: engine.load(checkpoint))

            for name, turns in zip(("save", "resume"), in_turns(rounds, save, load), strict=True):
                found[name] = median(each.seconds for each in turns)
    with trained(config(engine_name, STRATEGY, async_save=True), shape) as engine:
        turns = [_in_the_background(engine, place) for _ in range(rounds)]
    return found | {"blocks": median(each[0] for each in turns), "complete": median(each[1] for each in turns)}


def _in_the_background(engine: Any, place: Path) -> tuple[float, float]:
    """Until a save returns, and until it is complete."""
    with folder(place, "later") as path:
        blocks = measured(lambda: engine.save(path)).seconds
        return blocks, blocks + measured(engine.wait).seconds


def numel(hidden: int, layers: int) -> int:
    """Parameters of the model."""
    from unishard.testing.models import llama

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in llama(**sizes(hidden, layers)).parameters())
