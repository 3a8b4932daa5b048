"""What an optimizer keeps of whole matrices, such as preconditioners, each on the rank that owns the matrix.

In a checkpoint it is whole, by the matrix's name, so that any rank of any engine can own it afterwards.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unishard.checkpoint import tensor_names
from unishard.checkpoint.tensor_reader import Tensors
from unishard.checkpoint.user_state import once, pack, unpack
from unishard.distributed.on_ranks import on_all
from unishard.engine.state.part import CheckpointSource, Part, Saved, whole
from unishard.errors import CheckpointError
from unishard.matrices.matrix_optimizer import MatrixOptimizer
from unishard.matrices.whole_tensors import WholeTensors

_STATE, _NUMBERS_OF_ALL = "whole", ".numbers"
"""Names of packed state, which no key of a matrix has."""
_NUMBERS = {int: torch.int64, float: torch.float64}
"""Numbers are tensors without dimensions of these dtypes, which tensors of an optimizer are not."""


class Matrices(Part):
    """Empty for an optimizer that keeps nothing of whole matrices."""

    def __init__(self, optimizer: object) -> None:
        """Of what makes the updates."""
        self._optimizer = optimizer

    def saved(self, group: dist.ProcessGroup) -> Saved:
        """As in `Part`: an optimizer may keep something else than tensors and numbers."""
        return Saved(whole(on_all(group, self._state)), {})

    @torch.no_grad()
    def read(self, source: CheckpointSource) -> None:
        """As in `Part`: of the matrices that this rank owns; of those that were never updated there is nothing."""
        if isinstance(self._optimizer, WholeTensors):
            _resume_whole_state(self._optimizer, source.tensors)
        elif isinstance(self._optimizer, MatrixOptimizer):
            _resume(self._optimizer, source.tensors)

    def _state(self) -> dict[str, Tensor]:
        if isinstance(self._optimizer, WholeTensors):
            return _whole_state_of(self._optimizer)
        if not isinstance(self._optimizer, MatrixOptimizer):
            return {}
        return {
            f"{tensor_names.MATRICES}{name}.{key}": _as_tensor(self._optimizer, key, value)
            for name, state in self._optimizer.owned.items()
            for key, value in state.items()
        }


def _resume(optimizer: MatrixOptimizer, tensors: Tensors) -> None:
    owned = _owned(optimizer)
    found: dict[str, dict[str, Any]] = {}
    for full_name in tensors:
        name, _, key = full_name.removeprefix(tensor_names.MATRICES).rpartition(".")
        if full_name.startswith(tensor_names.MATRICES) and name in owned:
            value = tensors.full(full_name)
            number = not value.dim() and value.dtype in _NUMBERS.values()
            found.setdefault(name, {})[key] = value.item() if number else value.to(optimizer.device)
    optimizer.owned.clear()
    optimizer.owned.update(found)


def _owned(optimizer: MatrixOptimizer | WholeTensors) -> set[str]:
    return {
        matrix.name
        for matrix in optimizer.matrices()
        if matrix.group is None or matrix.owner == dist.get_rank(matrix.group)
    }


def _whole_state_of(optimizer: WholeTensors) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name in _owned(optimizer):
        found |= _packed(f"{name}.{_STATE}", optimizer.state_of(name), optimizer)
    if not dist.get_rank():
        found |= _packed(_NUMBERS_OF_ALL, optimizer.numbers(), optimizer)
    return found | {f"{tensor_names.MATRICES}.{place}": value for place, value in optimizer.copies().items()}


def _packed(name: str, value: Any, optimizer: object) -> dict[str, Tensor]:
    """A value in tensors: JSON as bytes, and those that it holds."""
    if not value:
        return {}
    prefix = tensor_names.MATRICES + name
    try:
        packed, tensors = pack(value, f"{prefix}.")
    except CheckpointError as error:
        raise CheckpointError(f"the state of {type(optimizer).__name__} cannot be saved: {error}") from error
    return tensors | {prefix: torch.frombuffer(bytearray(json.dumps(packed).encode()), dtype=torch.uint8)}


def _resume_whole_state(optimizer: WholeTensors, tensors: Tensors) -> None:
    names = {*tensors}

    def read(name: str) -> Any:
        full = tensor_names.MATRICES + name
        if full not in names:
            return {}
        return unpack(json.loads(bytes(tensors.full(full).tolist())), once(tensors.full))

    for name in _owned(optimizer):
        optimizer.write_state(name, read(f"{name}.{_STATE}"))
    optimizer.write_numbers(read(_NUMBERS_OF_ALL))
    for place, value in optimizer.copies().items():
        if (full := f"{tensor_names.MATRICES}.{place}") in names:
            value.copy_(tensors.full(full))


def _as_tensor(optimizer: object, key: str, value: object) -> Tensor:
    if isinstance(value, Tensor) and (value.dim() or value.dtype not in _NUMBERS.values()):
        return value
    if type(value) in _NUMBERS:
        return torch.tensor(value, dtype=_NUMBERS[type(value)])
    kind = f"a 0-d tensor in {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise CheckpointError(
        f"{type(optimizer).__name__} keeps {kind} as {key!r} of a matrix, which cannot be saved; keep tensors with "
        "dimensions, and Python's int and float"
    )
