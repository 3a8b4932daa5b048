"""Encodes a user's own state as JSON and tensors. Nothing is pickled.

| Python | JSON |
|---|---|
| `None`, `bool`, `str`, `int` up to 2^53, finite `float` | itself |
| `list`, `dict` with string keys | array, object |
| `dict` with other keys, or one that begins with `$` | `{"$items": [[key, value], ...]}` |
| `tuple` | `{"$tuple": [...]}` |
| larger `int`, infinite or not-a-number `float` | `{"$int": "0x..."}`, `{"$float": "inf"}` |
| `bytes` | `{"$bytes": name}` |
| tensor | `{"$tensor": name}` |
| numpy array | `{"$array": name}` |
| the states of all ranks, where they differ | `{"$ranks": [...]}`, only at the top |
| what lies deeper than 60 levels of the above | `{"$json": "..."}`, JSON in a string: many readers refuse deep JSON |

A name is that of a tensor in the checkpoint; an empty tensor is not stored, but written as `[dtype, shape]`. The
decoded state equals the original, except that subclasses of `dict` become plain dicts, numpy scalars become Python
numbers, and tensors have no autograd graph and are on the reader's device.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from unishard.checkpoint import tensor_names
from unishard.distributed.dtypes import dtype_named, name_of
from unishard.distributed.storable import STORABLE, obstacle
from unishard.errors import CheckpointError

_EXACT = 2**53
"""JSON readers that only know doubles round larger integers."""
_DEEPEST = 100
"""Maximum nesting depth."""
_SHALLOW = 60
"""JSON levels before the rest is put into a string; pydantic reads 200 (jiter 0.16)."""
_RANKS = "$ranks"


def pack(state: Any, prefix: str = tensor_names.STATE) -> tuple[Any, dict[str, Tensor]]:
    """Divide a state into JSON and tensors.

    Args:
        state: Dicts, lists, tuples, strings, bytes, numbers, booleans, None, tensors and numpy arrays, in any nesting.
        prefix: Prefix of the names of its tensors; unique for each state of a checkpoint.

    Returns:
        The JSON value, and the tensors by their names in a checkpoint. They share memory with the state's where
        possible.

    Raises:
        CheckpointError: A value has another type. Says where, and what to save instead.
    """
    packer = _Packer(prefix)
    return _shallow(packer.pack(state, ()), _SHALLOW), packer.tensors


def _shallow(value: Any, levels: int) -> Any:
    """Packed JSON of at most about so many levels, below which values are in strings."""
    if not isinstance(value, dict | list):
        return value
    if levels <= 0:
        return {"$json": json.dumps(value)}
    if isinstance(value, list):
        return [_shallow(item, levels - 1) for item in value]
    if "$tuple" in value:
        return {"$tuple": [_shallow(item, levels - 2) for item in value["$tuple"]]}
    if "$items" in value:
        return {"$items": [[_shallow(part, levels - 3) for part in item] for item in value["$items"]]}
    return value if _is_marker(value) else {key: _shallow(item, levels - 1) for key, item in value.items()}


def _is_marker(packed: dict[str, Any]) -> bool:
    return next(iter(packed), "").startswith("$")


def by_rank(states: Sequence[Any]) -> dict[str, Any]:
    """One state of those that `pack` has made on each rank."""
    return {_RANKS: list(states)}


def ranks_in(json_value: Any) -> list[Any] | None:
    """The argument of `by_rank`; None if all ranks had one state."""
    states = json_value.get(_RANKS) if isinstance(json_value, dict) else None
    return states if isinstance(states, list) else None


def unpack(json_value: Any, read: Callable[[str], Tensor]) -> Any:
    """Decode a state. The inverse of `pack`.

    Args:
        json_value: From `pack`.
        read: Returns a tensor by its name.

    Raises:
        CheckpointError: The JSON is not from `pack`.
    """
    if isinstance(json_value, list):
        return [unpack(item, read) for item in json_value]
    if not isinstance(json_value, dict):
        return json_value
    if not _is_marker(json_value):
        return {key: unpack(value, read) for key, value in json_value.items()}
    try:
        marker, packed = next(iter(json_value.items()))
        return _MARKERS[marker](packed, read)
    except (
        ArithmeticError,
        LookupError,
        TypeError,
        ValueError,
        RuntimeError,
    ) as problem:  # RuntimeError: torch's, and RecursionError
        if isinstance(problem, CheckpointError):
            raise
        raise CheckpointError(
            f"the saved state holds {json_value!r:.80}, which this version cannot decode ({type(problem).__name__}: "
            f"{problem}); load it with the version of unishard that wrote it"
        ) from problem


def once(read: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
    """The same reader, which reads each tensor once: `pack` refers to no tensor twice, and a short manifest must not
    fill the memory.

    Args:
        read: Returns a tensor by its name.
    """
    seen: set[str] = set()

    def read_once(name: str) -> Tensor:
        if name in seen:
            raise CheckpointError(f"the saved state refers to the tensor {name!r:.200} twice; the manifest is damaged")
        seen.add(name)
        return read(name)

    return read_once


_MARKERS: dict[str, Callable[[Any, Callable[[str], Tensor]], Any]] = {
    "$items": lambda items, read: {unpack(key, read): unpack(value, read) for key, value in items},
    "$tuple": lambda items, read: tuple(unpack(item, read) for item in items),
    "$int": lambda text, read: int(text, 16),
    "$float": lambda text, read: float(text),
    "$json": lambda text, read: unpack(json.loads(text), read),
    "$bytes": lambda name, read: _tensor(name, read).cpu().numpy().tobytes(),
    "$tensor": lambda name, read: _tensor(name, read),
    "$array": lambda name, read: _tensor(name, read).cpu().numpy(),
}

_Path = tuple[Any, ...]


class _Packer:
    """Packs one state and collects its tensors."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.tensors: dict[str, Tensor] = {}
        self._plain: dict[type, Callable[[Any, _Path], Any]] = {
            type(None): lambda value, path: value,
            bool: lambda value, path: value,
            int: lambda value, path: value if abs(value) <= _EXACT else {"$int": hex(value)},
            float: lambda value, path: value if math.isfinite(value) else {"$float": str(value)},
            str: _string,
            bytes: lambda value, path: {"$bytes": self._name(torch.tensor(bytearray(value), dtype=torch.uint8), path)},
            tuple: lambda value, path: {"$tuple": self._list(value, path)},
        }
        """Types that may also be dict keys. Subclasses, such as enums and named tuples, are excluded: their type would
        be lost."""
        self._others: dict[type, Callable[[Any, _Path], Any]] = {
            Tensor: self._tensor,
            np.ndarray: self._array,
            np.generic: self._scalar,
            Mapping: self._dict,
        }

    def pack(self, value: Any, path: _Path) -> Any:
        if len(path) > _DEEPEST:
            raise CheckpointError(
                f"state.{_dotted(path[:5])}... is nested deeper than {_DEEPEST} levels, or contains itself; save a "
                "flatter state"
            )
        if type(value) is list:
            return self._list(value, path)
        pack = self._plain.get(type(value)) or next(
            (pack for kind, pack in self._others.items() if isinstance(value, kind)), None
        )
        if pack is None:
            has_state = callable(getattr(value, "state_dict", None))
            raise _refusal(
                path,
                value,
                "its state_dict()" if has_state else "a dict, list, tuple, string, number or tensor made of it",
            )
        return pack(value, path)

    def _list(self, value: Any, path: _Path) -> list[Any]:
        return [self.pack(item, (*path, index)) for index, item in enumerate(value)]

    def _dict(self, value: Mapping[Any, Any], path: _Path) -> dict[str, Any]:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {_string(key, path): self.pack(item, (*path, key)) for key, item in value.items()}
        return {"$items": [[self._key(key, path), self.pack(item, (*path, key))] for key, item in value.items()]}

    def _key(self, key: Any, path: _Path) -> Any:
        if type(key) not in self._plain:
            raise _refusal(path, key, "a string or number", "has a key that is")
        return self._plain[type(key)](key, (*path, "key"))

    def _tensor(self, value: Tensor, path: _Path) -> dict[str, Any]:
        if isinstance(value, DTensor):
            raise _refusal(path, value, "its full_tensor(), called on all ranks")
        problem = obstacle(value) or ("is on the meta device" if value.device.type == "meta" else None)
        if problem is not None:
            raise CheckpointError(
                f"state.{_dotted(path)} {problem}, which cannot be saved; save a dense tensor of another dtype instead"
            )
        return {"$tensor": self._name(value.detach(), path)}

    def _array(self, value: np.ndarray[Any, Any], path: _Path) -> dict[str, Any]:
        if isinstance(value, np.ma.MaskedArray):
            raise _refusal(path, value, "its data and its mask")
        try:
            tensor = torch.from_numpy(
                np.array(value)
            )  # a copy: torch rejects negative strides and warns about read-only memory
        except (TypeError, ValueError) as problem:
            raise _refusal(
                path, value, "an array of numbers in native byte order, or its tolist()", f"is of {value.dtype} in a"
            ) from problem
        return {"$array": self._name(tensor, path)}

    def _scalar(self, value: np.generic, path: _Path) -> Any:
        number = value.item()
        if type(number) not in self._plain:
            raise _refusal(path, value, "a Python number or string")
        return self.pack(number, path)

    def _name(self, tensor: Tensor, path: _Path) -> str | list[Any]:
        """The tensor's name in the checkpoint, with a suffix if another path has the same spelling."""
        if not tensor.numel():  # there is nothing that a rank could write
            return [name_of(tensor.dtype), list(tensor.shape)]
        name = first = self._prefix + _dotted(path)
        count = 1
        while name in self.tensors:
            count += 1
            name = f"{first}~{count}"
        self.tensors[name] = tensor
        return name


def _tensor(name: str | list[Any], read: Callable[[str], Tensor]) -> Tensor:
    if isinstance(name, str):
        return read(name)
    dtype, shape = dtype_named(name[0]), torch.Size(name[1])
    if shape.numel() or dtype not in STORABLE:
        raise ValueError("a tensor without elements was expected")
    return torch.empty(shape, dtype=dtype)


def _string(value: str, path: _Path) -> str:
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise CheckpointError(
            f"state.{_dotted(path)}: {value!a:.80} contains a lone surrogate, which cannot be encoded as UTF-8; save "
            "bytes instead"
        )
    return value


def _refusal(path: _Path, value: Any, instead: str, how: str = "is a") -> CheckpointError:
    return CheckpointError(
        f"state.{_dotted(path)} {how} {type(value).__name__}, which is neither JSON nor a tensor; save {instead} "
        "instead"
    )


def _dotted(path: _Path) -> str:
    return ".".join(map(str, path)) or "value"
