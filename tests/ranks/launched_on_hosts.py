"""What two hosts run: every strategy, one after the other, and then a training that a host does not survive."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import launched_training

import unishard

CELLS = (
    ("fsdp", "no_shard"),
    ("deepspeed", "shard_optimizer"),
    ("fsdp", "shard_grad_op"),
    ("deepspeed", "full_shard"),
    ("fsdp", "hybrid_shard"),
    ("deepspeed", "hybrid_shard"),
    ("deepspeed", "hybrid_shard_grad_op"),
)
"""Every strategy on one of the engines: what they send is the same on one host. `hybrid_shard`, whose groups are hosts,
on both."""


def losses_of_strategies(base: Any) -> dict[str, list[float]]:
    """By engine and strategy."""
    found = {}
    for backend, strategy in CELLS:
        groups = ["sharding.group_size=2"] if strategy.startswith("hybrid") else []
        cfg = launched_training.config(base, f"backend={backend}", f"sharding.strategy={strategy}", *groups)
        found[f"{backend} {strategy}"] = list(launched_training.train(cfg, samples=24).values())
    return found


def main(base: str, strategies: str, losses: str) -> None:
    here = unishard.Topology.from_environment()
    # A host that is late starts the ranks anew, and so does one that is gone.
    if here.world_size == 4 and not Path(strategies).exists():
        found = losses_of_strategies(json.loads(base))
        if here.rank == 0:
            Path(strategies).write_text(json.dumps(found))
    sys.argv[1:] = [losses, "--end=-1:0:slow"]
    launched_training.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
