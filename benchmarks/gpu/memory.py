"""Compares the peak that `unishard plan` says with the one that the allocator saw, and looks at what a run leaves that
has not enough memory, or records it.

The CPU form plans and trains; it has no allocator to ask.
"""

from __future__ import annotations

import gc
import pickle
import tempfile
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

import unishard
from benchmarks.gpu import by_hand
from benchmarks.gpu.llamas import SIZES, Size
from benchmarks.gpu.report import Report
from benchmarks.gpu.throughput import allocated
from benchmarks.gpu.training import BACKENDS, attempt, full_size, side_by_side, train
from unishard.config import Config
from unishard.config.topology import Topology
from unishard.testing import run_ranks
from unishard.tools.plan.model import PlannedModel
from unishard.tools.plan.planning import make_plan

BOUND = 0.1
"""Maximum distance of the planned peak from the one that was allocated, relative to it."""
CASES: dict[str, dict[str, Any]] = {
    "full_shard": {},
    "full_shard, recomputation": {"activation_checkpointing": "full"},
    "full_shard, offload": {"offload": {"params": "cpu", "optimizer": "cpu"}},
    "shard_grad_op": {"sharding": "shard_grad_op"},
    "no_shard": {"sharding": "no_shard"},
    "full_shard, accumulation": {"training": {"gradient_accumulation_steps": 2}},
}
_STEPS = 4
_LITTLE = 2**29
"""Bytes that are left beside the state, fewer than the activations of a step."""


def run(report: Report) -> None:
    size = "medium" if full_size(report.device) else "tiny"

    def compare(backend: str) -> None:
        answers = attempt(report, f"{backend}: ran", lambda: run_ranks(1, measure, backend, size, timeout=150)[0])
        for name, (planned, peak, where) in (answers or {}).items():
            judge(report, f"{backend} {name}", planned, peak, where)

    def look(backend: str, what: str) -> None:
        name = f"{backend}: {what}"
        if (said := attempt(report, name, lambda: run_ranks(1, _LOOKS[what], backend, timeout=100)[0])) is not None:
            report.check(name, not said, said)

    looks = product(BACKENDS, _LOOKS) if full_size(report.device) else ()
    side_by_side(
        report.device, [partial(compare, each) for each in BACKENDS] + [partial(look, *each) for each in looks]
    )


def judge(report: Report, name: str, planned: int, peak: int, where: str) -> None:
    detail = f"planned {planned / 2**20:,.0f} MiB in the {where}, allocated {peak / 2**20:,.0f} MiB"
    if full_size(report.device):
        report.check(
            f"{name}: peak within {BOUND:.0%}", abs(planned - peak) <= BOUND * peak, detail, planned=planned, peak=peak
        )
    else:
        report.needs_cuda(f"{name}: peak", detail)


def config(backend: str, size: Size, changes: dict[str, Any]) -> Config:
    training = {"micro_batch_size": size.batch, "gradient_clipping": 1.0} | changes.get("training", {})
    cfg = {"backend": backend, "sharding": "full_shard", "precision": "bf16", "optimizer": {"name": "adamw"}}
    return Config.model_validate(cfg | changes | {"training": training})


def medium() -> torch.nn.Module:
    """For `unishard plan`."""
    return by_hand.model(SIZES["medium"], torch.device("cpu"))


def tiny() -> torch.nn.Module:
    """For `unishard plan`."""
    return by_hand.model(SIZES["tiny"], torch.device("cpu"))


def measure(backend: str, name: str) -> dict[str, tuple[int, int, str]]:
    """By case: the planned peak, the allocated one, and where the plan has it."""
    return {case: once(backend, name, changes) for case, changes in CASES.items()}


def once(backend: str, name: str, changes: dict[str, Any]) -> tuple[int, int, str]:
    size = SIZES[name]
    cfg = config(backend, size, changes)
    planned = make_plan(
        cfg, PlannedModel(f"{__name__}:{name}", cfg), Topology(world_size=1), None, seq_len=size.length, answers=False
    ).own.peak
    assert planned is not None
    for _ in range(2):  # of the case before
        gc.collect()
    before = allocated()
    with unishard.prepare(by_hand.model(size), cfg) as engine:
        data = list(by_hand.batches(size, _STEPS * cfg.training.gradient_accumulation_steps))
        train(engine, data[: len(data) // 2])
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        train(engine, data[len(data) // 2 :])
        peak = torch.cuda.max_memory_allocated() - before if torch.cuda.is_available() else 0
    return planned.nbytes, peak, planned.where


def again(backend: str) -> str:
    """Prepare one model after the other: what the third finds taken, or an empty text. The first step of the first made
    workspaces that stay, such as those of cuBLAS.
    """
    _, second, third = (held(backend) for _ in range(3))
    return "" if third <= 1.01 * second else f"{second / 2**20:,.0f} MiB held by the second, {third / 2**20:,.0f} then"


def held(backend: str) -> int:
    """Bytes on the device after `prepare`; then it trains and closes the engine."""
    size = SIZES["medium"]
    with unishard.prepare(by_hand.model(size, torch.device("cpu")), config(backend, size, {})) as engine:
        now = allocated()
        train(engine, list(by_hand.batches(size, 2)))
    return now


def too_much(backend: str) -> str:
    """Train on less memory than a step needs: what is missing in the error, or an empty text."""
    size = SIZES["medium"]
    cfg = config(backend, size, {})
    with unishard.prepare(by_hand.model(size), cfg) as engine:
        torch.cuda.empty_cache()
        card = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + _LITTLE) / card)
        try:
            train(engine, list(by_hand.batches(size, _STEPS)))
        except torch.OutOfMemoryError as error:
            notes = "\n".join(getattr(error, "__notes__", []))
            print(notes, flush=True)
            wanted = ("unishard planned for this rank", "what would help most", "--set ")
            return "" if all(word in notes for word in wanted) else f"its notes: {notes or 'none'}"
    return "no error"


def snapshot(backend: str) -> str:
    """Record a step with its memory: what is wrong with the files, or an empty text."""
    size = SIZES["medium"]
    with tempfile.TemporaryDirectory(prefix="snapshot-") as folder:
        cfg = config(backend, size, {"profile": {"steps": [2, 3], "dir": folder, "memory": True}})
        with unishard.prepare(by_hand.model(size), cfg) as engine:
            train(engine, list(by_hand.batches(size, _STEPS)))
        names = sorted(path.name for path in Path(folder).iterdir())
        if names != ["steps-2-3.rank0.memory.pickle", "steps-2-3.rank0.trace.json"]:
            return f"files: {names}"
        found = pickle.loads((Path(folder) / names[0]).read_bytes())
        kernels = '"cat": "kernel"' in (Path(folder) / names[1]).read_text()
        stacks = [event for events in found["device_traces"] for event in events if event.get("frames")]
        return "" if stacks and kernels else f"stacks: {len(stacks)}, kernels in the trace: {kernels}"


_LOOKS = {
    "an out-of-memory error says the plan": too_much,
    "profile.memory writes a snapshot": snapshot,
    "an engine takes no memory after it is closed": again,
}
