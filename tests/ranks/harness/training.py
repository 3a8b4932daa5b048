"""The tiny training of most tests, and the cells of it that they take."""

from __future__ import annotations

import os
from itertools import product

from dev.ranks.training import *  # noqa: F403
from unishard.testing.cells import BACKENDS, STRATEGIES

PRECISIONS = ("fp32", "bf16")
DEEP = "TESTS_DEEP" in os.environ
"""Whether `--deep` is asked for: `tests/conftest.py` sets it, for the ranks too."""
MECHANISMS = (("fsdp", "no_shard"), ("fsdp", "full_shard"), ("deepspeed", "shard_grad_op"), ("deepspeed", "full_shard"))
"""DDP, fully_shard, ZeRO's optimizer of stages 1 and 2, and that of stage 3."""
LEFT_OUT = () if DEEP else tuple(pair for pair in product(BACKENDS, STRATEGIES) if pair not in MECHANISMS)
"""Engines with strategies that are another one but for when gradients or parameters move. The conformance suite trains
them in every area."""
PAIRS = tuple(pair for pair in product(BACKENDS, STRATEGIES) if pair not in LEFT_OUT)
"""Each backend with each strategy."""
EVERY = tuple(
    (backend, strategy, PRECISIONS[(first + number) % 2])
    for first, backend in enumerate(BACKENDS)
    for number, strategy in enumerate(STRATEGIES)
)
"""Every strategy of each backend in one precision, and in the other one on the other backend: every pair of two of the
three."""
SPANNING = tuple(cell for cell in EVERY if cell[:2] in PAIRS)
"""What most tests take of it."""
FEWER = tuple(cell for cell in PAIRS if DEEP or cell[1] == "full_shard")
FEWER_SPANNING = tuple(cell for cell in SPANNING if DEEP or cell[1] == "full_shard")
"""Of `PAIRS` and `SPANNING` those that gather parameters: enough for what the core does around any strategy."""
EACH = tuple((backend,) for backend in BACKENDS)
"""Cells of `in_ranks`."""
OTHER = dict(zip(BACKENDS, BACKENDS[::-1], strict=True))
