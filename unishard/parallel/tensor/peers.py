"""What ranks of a group send each other around a module."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from unishard.parallel.collectives import copied, gathered, split, summed
from unishard.parallel.groups import Groups

_KEPT = 2
"""Copies that are remembered: of the inputs of a mixture, whose shared experts read one of them again."""


class Peers:
    """Collectives of a group."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        # Not on the tensors themselves: a copy holds what it was made of, in C++, where no collector looks.
        self._copies = deque[tuple[Tensor, int, Tensor]](maxlen=_KEPT)

    def copy(self, values: Tensor) -> Tensor:
        """What all ranks have, for modules that use a part of it: one for all of them, with one sum in backward."""
        if not (values.requires_grad and torch.is_grad_enabled()):
            return values
        if torch.compiler.is_compiling():  # what is remembered is not traced
            return copied(values, self._groups)
        for source, version, copy in self._copies:
            if source is values and version == values._version:  # not changed in place since
                return copy
        copy = copied(values, self._groups)
        self._copies.append((values, values._version, copy))
        return copy

    def sum(self, values: Tensor) -> Tensor:
        """The sum of what the ranks have."""
        return summed(values, self._groups)

    def gather(self, values: Tensor) -> Tensor:
        """The last dimension of which each rank has a part."""
        return gathered(values, self._groups)

    def split(self, values: Tensor) -> Tensor:
        """This rank's part of the last dimension of what all ranks have."""
        return split(values, self._groups)
