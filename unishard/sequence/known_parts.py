"""The tensors that were split, as long as something else holds them."""

from __future__ import annotations

from typing import Any
from weakref import ref

from torch import Tensor

from unishard.distributed.nested_tensors import tensors_in


class KnownParts:
    """Parts of batches, by which whole samples are told from them."""

    def __init__(self) -> None:
        self._parts: list[ref[Tensor]] = []
        self.any = False
        """Whether anything was split."""

    def add(self, value: Any) -> None:
        """Know the tensors in a value."""
        self.any = True
        self._parts = [part for part in self._parts if part() is not None]
        self._parts += [ref(tensor) for tensor in tensors_in(value)]

    def has(self, call: Any) -> bool:
        """Whether one of them is an argument of a call."""
        known = [part() for part in self._parts]
        return any(tensor is part for tensor in tensors_in(call) for part in known)
