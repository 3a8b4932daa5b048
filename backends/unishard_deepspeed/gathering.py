"""Stage 3: keep parameters gathered for `engine.weights.unsharded`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from unishard_deepspeed.private.reduction import not_freed
from unishard_deepspeed.private.shown_parameters import OUTSIDE

_EMPTY = re.compile(r"\(0\)|\[0\]|\b0x\d|\dx0\b|'weight' must be 2-D")
"""In torch 2.13's errors for shapes, where one tensor is a parameter that is not gathered, which has the shape (0,)."""


def is_of_shard(error: RuntimeError) -> bool:
    """Whether an error is that of an operation on an empty tensor, or of a weight that was read in its place."""
    return OUTSIDE in str(error) or _EMPTY.search(str(error)) is not None


@contextmanager
def keep_gathered(engine: Any, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """A block in which parameters are full. Collective.

    Args:
        engine: The `DeepSpeedEngine`.
        parameters: Its parameters.
    """
    import deepspeed

    # what was prefetched and not used is in flight, and would be freed by the next forward
    engine.empty_partition_cache()
    with not_freed(parameters), deepspeed.zero.GatheredParameters(list(parameters)):
        try:
            yield
        except BaseException:
            # modules whose forward has failed still hold parameters, for which DeepSpeed would raise another error
            engine.empty_partition_cache()
            raise
