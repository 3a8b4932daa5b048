"""Which optimizers may step shards as plain tensors."""

from __future__ import annotations

import torch

from unishard.distributed.shard_optimizer import ShardOptimizer

_ELEMENT_WISE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
"""Each element is updated from its own value, gradient and state, and from the options of its group; as in Lion of
lion_pytorch.
"""


def is_element_wise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an update is known to be element-wise, so that stepping shards as plain tensors gives the same values.

    By class: what a subclass does differently is not known. A `ShardOptimizer` knows what shards it steps.
    """
    return isinstance(optimizer, ShardOptimizer) or steps_in_parts(optimizer)


def steps_in_parts(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the update of a parameter is known to need no other parameter, so that several calls of `step`, each on
    some parameters, are one update of all.
    """
    kind = type(optimizer)
    return kind in _ELEMENT_WISE or (kind.__module__, kind.__name__) == ("lion_pytorch.lion_pytorch", "Lion")
