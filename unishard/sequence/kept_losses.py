"""Losses that modules keep as attributes, such as one that balances experts, of which each rank has that of its part.

They are read past the output of the model, so they are compared apart: what is a sum or a mean over positions adds up
over the ranks, and anything else is another loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unishard.distributed.nested_tensors import tensors_in
from unishard.sequence.followed import at_ends
from unishard.sequence.group import SequenceGroup

_ROOM, _ROOM_LOW = 1e-4, 2e-2
"""Of a loss: what is rounded in fp32, and in 16 bits."""
_LOW = 2
"""Bytes."""


class KeptLoss(NamedTuple):
    """A scalar that a module keeps."""

    module: nn.Module
    title: str
    attribute: str
    number: int

    def value(self) -> Tensor | None:
        """What it is now."""
        kept = list(tensors_in(vars(self.module).get(self.attribute)))
        return kept[self.number] if self.number < len(kept) else None


def kept_losses(model: nn.Module) -> dict[KeptLoss, Tensor]:
    """All scalars that modules keep."""
    return {
        KeptLoss(module, f"{name}.{attribute}" if name else attribute, attribute, number): tensor
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if not attribute.startswith("_")
        for number, tensor in enumerate(tensors_in(value))
        if not tensor.dim() and tensor.is_floating_point()
    }


def changed_by_parts(
    model: nn.Module,
    before: dict[KeptLoss, Tensor],
    part: Callable[[], Any],
    whole: Callable[[], Any],
    group: SequenceGroup,
) -> tuple[KeptLoss, ...]:
    """Which of those that a forward computes are no sum and no mean over positions. Collective in the group.

    Args:
        model: The model.
        before: What `kept_losses` returned before any forward.
        part: Runs it over this rank's positions.
        whole: Runs it over all.
        group: The ranks that share the positions.
    """
    computed = [kept for kept, tensor in kept_losses(model).items() if before.get(kept) is not tensor]
    if not computed:
        return ()
    dtypes: set[torch.dtype] = set()
    with at_ends(model, lambda key, taken, made: dtypes.update(each.dtype for each in tensors_in(made))):
        part()
    low = any(dtype.is_floating_point and dtype.itemsize <= _LOW for dtype in dtypes)
    total = torch.stack([_number(kept) for kept in computed])
    dist.all_reduce(total, group=group.hosts)
    whole()
    wanted = torch.stack([_number(kept) for kept in computed])
    room = (_ROOM_LOW if low else _ROOM) * wanted.abs()
    wrong = ((total - wanted).abs() > room) & ((total / group.size - wanted).abs() > room)
    return tuple(kept for kept, differs in zip(computed, wrong.tolist(), strict=True) if differs)


def _number(kept: KeptLoss) -> Tensor:
    value = kept.value()
    return torch.zeros((), dtype=torch.float64) if value is None else value.detach().double().cpu()
