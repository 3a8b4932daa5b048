"""The pairs of runs that test_resuming.py resumes."""

from __future__ import annotations

from itertools import product

from dev.resuming import WORLDS
from unishard.testing.cells import BACKENDS, STRATEGIES
from unishard.testing.resuming import Pair, ResumedRun


def spanning_pairs() -> list[Pair]:
    """Every strategy of every engine as source and as target of each world size once, and to itself once; `make matrix`
    measures all.
    """
    kinds = list(product(BACKENDS, STRATEGIES))
    pairs: list[Pair] = []
    for turn, (before, after) in enumerate(product(WORLDS, WORLDS)):
        precision = "bf16" if turn % 4 == 3 else "fp32"
        for place, kind in enumerate(kinds):
            if place % 3 == (turn + turn // 3) % 3:
                other = kinds[(place + 4 + turn % 3) % len(kinds)]  # mostly on the other engine
                pairs.append(Pair(ResumedRun(*kind, before, precision), ResumedRun(*other, after, precision)))
    saved = {(run.backend, run.strategy, run.world): run for run, _ in pairs}
    for place, kind in enumerate(kinds):
        run = saved[*kind, (2, 4)[(place + place // len(STRATEGIES)) % 2]]
        pairs.append(Pair(run, run))
    for source, target in (
        (
            ResumedRun("fsdp", "full_shard", 2, "bf16", "offloaded"),
            ResumedRun("deepspeed", "shard_grad_op", 4, "bf16", "offloaded"),
        ),
        (
            ResumedRun("fsdp", "full_shard", 2, "fp32", "all_offloaded"),
            ResumedRun("deepspeed", "full_shard", 2, "fp32", "all_offloaded"),
        ),
        (
            ResumedRun("fsdp", "hybrid_shard", 4, "fp32", "hybrid"),
            ResumedRun("deepspeed", "hybrid_shard_grad_op", 4, "fp32", "hybrid"),
        ),
        (ResumedRun("fsdp", "full_shard", 2, "fp16"), ResumedRun("deepspeed", "full_shard", 4, "fp16")),
    ):
        pairs += [Pair(source, target), Pair(target, source), Pair(source, source), Pair(target, target)]
    return list(dict.fromkeys(pairs))
