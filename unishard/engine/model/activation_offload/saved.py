"""What stands for a tensor in the graph that stays on the device, until backward asks for it."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor


class OnDevice:
    """A tensor that stays where it is."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, tensor._version

    def tensor(self) -> Tensor:
        """The same tensor, with the check that torch does where no hook takes what it saves."""
        if self._tensor._version != self._version:
            raise_written(tuple(self._tensor.shape))
        return self._tensor


class OfWeight:
    """A view of a weight, which the engine frees, and gathers again before backward, perhaps elsewhere."""

    def __init__(self, weight: Tensor, view: Tensor) -> None:
        self._weight = OnDevice(weight)
        self._size, self._stride = view.size(), view.stride()
        self._offset = view.storage_offset() - weight.storage_offset()

    def tensor(self) -> Tensor:
        """The view of the weight as it is gathered now."""
        weight = self._weight.tensor().detach()
        return weight.as_strided(self._size, self._stride, weight.storage_offset() + self._offset)


def raise_written(shape: tuple[int, ...]) -> NoReturn:
    """Raise what torch raises for a saved tensor that was written before its backward."""
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
        f"shape {shape}, which offload.activations was to bring back as it was saved; write to a copy of it instead"
    )
