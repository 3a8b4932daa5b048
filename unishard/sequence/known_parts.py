"""The tensors that were split, as long as something else holds them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ref

from torch import Tensor

from unishard.distributed.nested_tensors import tensors_in


class KnownParts:
    """Parts of batches, by which whole samples are told from them."""

    def __init__(self) -> None:
        self._parts: list[tuple[ref[Tensor], int]] = []
        self._whole: list[ref[Tensor]] = []
        self._last: int | None = None
        """The length of what was split last."""

    @property
    def any(self) -> bool:
        """Whether anything was split."""
        return self._last is not None

    def add(self, value: Any, length: int, whole: Iterable[Tensor] = ()) -> None:
        """Know the tensors in a value, parts of samples of a length before padding; some are whole."""
        self._last = length
        self._whole = [tensor for tensor in self._whole if tensor() is not None] + [*map(ref, whole)]
        self._parts = [(part, of) for part, of in self._parts if part() is not None]
        self._parts += [(ref(tensor), length) for tensor in tensors_in(value)]

    def has(self, call: Any) -> bool:
        """Whether one of them is an argument of a call."""
        return self._known(call) is not None

    def is_whole(self, tensor: Tensor) -> bool:
        """Whether a tensor of a batch is known not to be split."""
        return any(tensor is each() for each in self._whole)

    def length(self, call: Any, padded: int) -> int:
        """How long the samples of a call were before padding: of which it has parts, or something computed of parts.

        Args:
            call: Arguments.
            padded: Their length with padding.
        """
        known = self._known(call) or self._last
        return padded if known is None else min(known, padded)

    def _known(self, call: Any) -> int | None:
        known = [(part(), length) for part, length in self._parts]
        tensors = list(tensors_in(call))
        return next(
            (length for part, length in known if part is not None and any(_is_of(each, part) for each in tensors)), None
        )


def _is_of(tensor: Tensor, part: Tensor) -> bool:
    """Whether a tensor is a part or a view of it."""
    place = part.untyped_storage().data_ptr()
    return tensor is part or (place != 0 and tensor.untyped_storage().data_ptr() == place)
