"""Cast and find tensors in whatever a forward takes and returns."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast every floating-point tensor in a value to `dtype`; other tensors and objects stay as they are.

    Args:
        value: As in `replace_tensors`.
        dtype: A floating-point dtype.
    """
    return replace_tensors(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def replace_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Replace every tensor in a value by what a function makes of it.

    Works inside lists, tuples, named tuples, mappings (also a `UserDict` such as a transformers `BatchEncoding`),
    dataclasses and packed sequences. A container with nothing to replace is returned as the same object.

    Args:
        value: Anything.
        change: Returns the same tensor where nothing is to be replaced.
    """
    match value:
        case Tensor():
            return change(value)
        case PackedSequence():
            data = change(value.data)
            return value if data is value.data else type(value)(data, *value[1:])
        case UserDict() | dict():
            return _replaced(value, {key: replace_tensors(inner, change) for key, inner in value.items()})
        case tuple() | list():
            return _sequence(value, [replace_tensors(inner, change) for inner in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _fields(value, change)
    return value


def _replaced(mapping: Any, inner: Mapping[Any, Any]) -> Any:
    if all(inner[key] is old for key, old in mapping.items()):
        return mapping
    # A copy keeps the class and its attributes: a defaultdict's factory, the encodings of a BatchEncoding.
    fresh = copy.copy(mapping)
    if isinstance(mapping, UserDict):
        fresh.data = dict(inner)
        return fresh
    for key, value in inner.items():
        fresh[key] = value
    return fresh


def _sequence(value: Any, inner: list[Any]) -> Any:
    if all(new is old for new, old in zip(inner, value, strict=True)):
        return value
    return type(value)(*inner) if hasattr(value, "_fields") else type(value)(inner)


def _fields(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    names = (field.name for field in dataclasses.fields(value))
    inner = {name: getattr(value, name) for name in names if hasattr(value, name)}
    changed = {name: new for name, old in inner.items() if (new := replace_tensors(old, change)) is not old}
    if not changed:
        return value
    fresh = copy.copy(value)
    for name, new in changed.items():
        object.__setattr__(fresh, name, new)  # also for frozen dataclasses
    return fresh


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        return iter((value,))
    return iter([item for item in values_in(value) if isinstance(item, Tensor)])


def hook_gradients(value: Any, hook: Callable[[Tensor], None]) -> None:
    """Call a function with the gradient of each tensor in a value, once a backward has computed it."""
    if torch.is_grad_enabled():
        for tensor in tensors_in(value):
            if tensor.requires_grad:
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]


def values_in(value: Any) -> list[Any]:
    """A value and everything inside it: the contents of tuples, lists, mappings and dataclasses. Leaves out what cannot
    be read.
    """
    values = [value]
    _collect(value, (), values)
    return values


def _collect(value: Any, around: tuple[Any, ...], values: list[Any]) -> None:
    around = (*around, value)
    for item in _inside(value):
        values.append(item)
        # A container may contain itself.
        if not isinstance(item, _LEAVES) and not any(item is outer for outer in around):
            _collect(item, around, values)


_LEAVES = (Tensor, str, int, float, NoneType)


def _inside(value: Any) -> Sequence[Any]:
    if isinstance(value, list | tuple):
        return value
    try:
        if isinstance(value, Mapping):
            return [*value.values()]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return [getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)]
    except Exception:  # of a foreign class, whose contents guards do not read
        return ()
    return ()
