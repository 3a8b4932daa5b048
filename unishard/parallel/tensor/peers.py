"""What ranks of a group send each other around a module."""

from __future__ import annotations

import torch
from torch import Tensor

from unishard.parallel.collectives import copied, gathered, split, summed
from unishard.parallel.groups import Groups

_COPY = "_unishard_copy"


class Peers:
    """Collectives of a group; in a plan, they send nothing."""

    def __init__(self, groups: Groups) -> None:
        self.groups, self._peers = groups, groups.peers

    def copy(self, values: Tensor) -> Tensor:
        """What all ranks have, for modules that use a part of it: one for all of them, with one sum in backward."""
        if self._peers is None or not (values.requires_grad and torch.is_grad_enabled()):
            return values
        if torch.compiler.is_compiling():  # attributes of tensors are not traced
            return copied(values, self._peers)
        version, copy = getattr(values, _COPY, (-1, values))
        if version != values._version:  # not known, or changed in place since
            copy = copied(values, self._peers)
            setattr(values, _COPY, (values._version, copy))
        return copy

    def sum(self, values: Tensor) -> Tensor:
        """The sum of what the ranks have."""
        return values if self._peers is None else summed(values, self._peers)

    def gather(self, values: Tensor) -> Tensor:
        """The last dimension of which each rank has a part."""
        if self._peers is None:
            return torch.cat([values] * self.groups.size, -1)
        return gathered(values, self._peers)

    def split(self, values: Tensor) -> Tensor:
        """This rank's part of the last dimension of what all ranks have."""
        if self._peers is None:
            return values.chunk(self.groups.size, -1)[self.groups.number]
        return split(values, self._peers)
