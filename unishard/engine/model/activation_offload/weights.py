"""Tell weights from activations: by where they lie while a unit computes."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class PlacedWeights:
    """The parameters and buffers of a unit during one of its forwards."""

    def __init__(self, module: nn.Module, passed: Iterable[Tensor] = ()) -> None:
        """Look at what is gathered.

        Args:
            module: The unit; its engine has gathered its parameters.
            passed: What the unit is called with; a parameter of another module may be among it.
        """
        self._placed: list[tuple[int, int]] = []
        """Addresses, each with its index in `_tensors`, in order."""
        self._tensors: list[Tensor] = []
        self._absent: list[tuple[dict[str, Any], str]] = []
        """Those that modules inside gather for themselves."""
        for part in module.modules():
            for table in (vars(part)["_parameters"], vars(part)["_buffers"]):
                self._absent += [(table, name) for name in table]
        self._look_again()
        for tensor in passed:
            base = getattr(tensor, "_base", None)
            base = tensor if base is None else base
            if isinstance(base, nn.Parameter):
                self._add(base)

    def owner(self, tensor: Tensor) -> Tensor | None:
        """The weight in whose memory a tensor lies; None for an activation."""
        owner = self._find(tensor)
        return self._find(tensor) if owner is None and self._look_again() else owner

    def _find(self, tensor: Tensor) -> Tensor | None:
        address = tensor.data_ptr()
        at = bisect_right(self._placed, address, key=lambda placed: placed[0]) - 1
        if at < 0:
            return None
        start, index = self._placed[at]
        weight = self._tensors[index]
        return weight if address < start + weight.nbytes else None

    def _look_again(self) -> bool:
        """Whether weights have been gathered that were absent before."""
        absent, self._absent = self._absent, []
        for table, name in absent:
            weight = dict.get(table, name)  # DeepSpeed's table gathers what it is asked for
            if isinstance(weight, Tensor) and not isinstance(weight, DTensor) and weight.numel():
                self._add(weight)
            else:
                self._absent.append((table, name))
        return len(self._absent) < len(absent)

    def _add(self, weight: Tensor) -> None:
        insort(self._placed, (weight.data_ptr(), len(self._tensors)))
        self._tensors.append(weight)
