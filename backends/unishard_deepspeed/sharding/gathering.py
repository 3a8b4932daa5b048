"""Stage 3: keep parameters gathered for `engine.weights.unsharded`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from unishard.errors import ModelError
from unishard_deepspeed.private.partitioned import not_freed
from unishard_deepspeed.private.shown_parameters import OUTSIDE

_EMPTY = re.compile(r"\(0\)|\[0\]|\b0x\d|\dx0\b|'weight' must be 2-D")
"""In torch 2.13's errors for shapes, where one tensor is a parameter that is not gathered, which has the shape (0,)."""


def is_of_shard(error: RuntimeError) -> bool:
    """Whether an error is that of an operation on an empty tensor, or of a weight that was read in its place."""
    return OUTSIDE in str(error) or _EMPTY.search(str(error)) is not None


def refuse_unused_output(error: AssertionError) -> None:
    """Raise ModelError in place of DeepSpeed's error for a gradient that reaches the input of a module which has had
    none for its output (0.19.8, runtime/zero/partitioned_param_coordinator.py, release_sub_module).
    """
    if "active_backward_submodules" in str(error):
        raise ModelError(
            "the loss uses what a model computes inside its forward, such as features that a hook keeps, and not its "
            "output, and the model's input requires a gradient: full_shard of deepspeed ends the backward of a module "
            "only where its output has a gradient; add the output to the loss, as in loss + 0.0 * output.sum(), or "
            "write sharding: shard_grad_op"
        ) from error


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
