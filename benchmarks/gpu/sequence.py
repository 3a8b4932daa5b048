"""The longest sequence that one card trains on: layers of Llama 3 8B, with recomputation alone, the loss in chunks, and
activations in host memory.

Parameters and optimizer state are in host memory, which holds fewer layers than the card could use; how many there are
changes little on the device. The CPU form trains on two short sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import unishard
from benchmarks.gpu import by_hand
from benchmarks.gpu.llamas import SIZES, Size
from benchmarks.gpu.report import Report
from benchmarks.gpu.training import attempt, full_size, train
from unishard.config import Config
from unishard.testing import run_ranks

LAYERS = 4
FIRST, LAST = 2**14, 2**20
"""Positions of the shortest and of the longest sequence, each twice as long as the one before."""
CHUNK = 8192
RECOMPUTED: dict[str, Any] = {"activation_checkpointing": "full", "offload": {"params": "cpu", "optimizer": "cpu"}}
CHUNKED = RECOMPUTED | {"training": {"loss_chunk_tokens": CHUNK}}
OFFLOADED = CHUNKED | {"offload": {"params": "cpu", "optimizer": "cpu", "activations": "cpu"}}
CASES = {
    "fsdp, recomputation": ("fsdp", RECOMPUTED),
    "fsdp, and the loss in chunks": ("fsdp", CHUNKED),
    "fsdp, and activations in host memory": ("fsdp", OFFLOADED),
    "deepspeed, and activations in host memory": ("deepspeed", OFFLOADED),
}


def run(report: Report) -> None:
    size = SIZES["8b"]._replace(layers=LAYERS) if full_size(report.device) else SIZES["tiny"]._replace(batch=1)
    lengths = tuple(doubled(FIRST, LAST)) if full_size(report.device) else (32, 64)
    found: dict[str, int] = {}
    for name, (backend, sections) in CASES.items():
        work = lambda case=(backend, sections): run_ranks(1, longest, *case, size, lengths, timeout=280)[0]  # noqa: E731
        if (length := attempt(report, name, work)) is not None:
            found[name] = length
            report.check(f"{name}: trains", length > 0, f"{length:,} positions, {size.layers} layers", length=length)
    if full_size(report.device) and len(found) == len(CASES):
        first, *_, last = found.values()
        report.check("it gets longer", last > first, f"{first:,} to {last:,} positions")
    elif not full_size(report.device):
        report.needs_cuda("the longest sequence", f"trained on {lengths[-1]} positions")


def doubled(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2


def longest(backend: str, sections: dict[str, Any], size: Size, lengths: tuple[int, ...]) -> int:
    """The longest of these lengths whose update fits on the device; 0 if none does."""
    training = {"micro_batch_size": 1, "gradient_clipping": 1.0} | sections.get("training", {})
    cfg = Config.model_validate(
        {"backend": backend, "sharding": "full_shard", "precision": "bf16", **sections, "training": training}
    )
    fits = 0
    with unishard.prepare(by_hand.model(size._replace(length=lengths[-1])), cfg) as engine:
        for length in lengths:
            try:
                train(engine, list(by_hand.batches(size._replace(length=length), 1)))
            except torch.OutOfMemoryError:
                break
            fits = length
    return fits
