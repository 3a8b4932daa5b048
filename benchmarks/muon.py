"""What an update by Muon costs beside AdamW's, and beside torch.optim.Muon on the DTensors of FSDP2 by hand.

    python -m benchmarks.muon                    # 2 ranks
    python -m benchmarks.muon --ranks 4 --turns 60

All loops live in the same processes and take turns: printed is the median time of an update of each, and the median of
its ratio to AdamW's of the same turn, which is free of what else the machine is doing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import unishard
from unishard.testing import run_ranks
from unishard.testing.models import llama

SIZES = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 256,
}
WARM_UP = 3


def batch() -> dict[str, torch.Tensor]:
    own = torch.Generator().manual_seed(unishard.Topology.from_environment().rank)
    tokens = torch.randint(0, SIZES["vocab_size"], (2, 128), generator=own)
    return {"input_ids": tokens, "labels": tokens}


def through_unishard(backend: str, optimizer: str) -> Callable[[], None]:
    cfg = unishard.Config.model_validate(
        {"backend": backend, "sharding": "full_shard", "optimizer": optimizer, "training": {"micro_batch_size": 2}}
    )
    engine, inputs = unishard.prepare(llama(**SIZES), cfg), batch()

    def update() -> None:
        engine.backward(engine(**inputs).loss)
        engine.step()

    return update


def by_hand() -> Callable[[], None]:
    """Two optimizers on DTensors: torch gathers the momentum of each matrix on every rank."""
    model: Any = llama(**SIZES)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    inside = [each for name, each in model.named_parameters() if ".layers." in name and each.dim() == 2]
    others = [each for each in model.parameters() if all(each is not one for one in inside)]
    optimizers = [torch.optim.Muon(inside), torch.optim.AdamW(others)]
    inputs = batch()

    def update() -> None:
        model(**inputs).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)  # unishard reports the norm of each update
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return update


def times(turns: int) -> dict[str, list[float]]:
    loops = {
        "fsdp, AdamW": through_unishard("fsdp", "adamw"),
        "fsdp, Muon": through_unishard("fsdp", "muon"),
        "torch.optim.Muon on DTensors": by_hand(),
        "deepspeed, AdamW": through_unishard("deepspeed", "adamw"),
        "deepspeed, Muon": through_unishard("deepspeed", "muon"),
    }
    taken: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(WARM_UP + turns):
        for name, update in loops.items():
            start = time.perf_counter()
            update()
            taken[name].append(time.perf_counter() - start)
    return {name: each[WARM_UP:] for name, each in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--json", help="write the figures into this file")
    given = parser.parse_args()
    taken = run_ranks(given.ranks, times, given.turns, timeout=3600)[0]
    first = taken["fsdp, AdamW"]
    figures = {
        name: (statistics.median(each), statistics.median(one / base for one, base in zip(each, first, strict=True)))
        for name, each in taken.items()
    }
    for name, (seconds, ratio) in figures.items():
        print(f"{name:30} {seconds * 1e3:8.1f} ms   {ratio:5.2f} x AdamW on FSDP2")
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
