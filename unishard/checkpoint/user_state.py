"""What a user saves besides the model, as JSON and tensors. Nothing is pickled.

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

A name is that of a tensor in the checkpoint; a tensor without elements is not stored, and stands as `[dtype, shape]`. What comes back is
what was given, but for subclasses of `dict` (a plain one), numpy's scalars (Python's numbers) and tensors (without a graph, where the
reader puts them).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from unishard.checkpoint import keys
from unishard.errors import CheckpointError

__all__ = ["pack", "unpack"]

_EXACT = 2**53
"""Integers beyond it are rounded by readers of JSON that know only doubles."""
_DEEPEST = 100
"""Levels of nesting."""


def pack(state: Any, prefix: str = keys.STATE) -> tuple[Any, dict[str, Tensor]]:
    """Divide a state into JSON and tensors.

    Args:
        state: Dicts, lists, tuples, strings, bytes, numbers, booleans, None, tensors and numpy arrays, in any nesting.
        prefix: What the names of its tensors begin with; another one for each state of a checkpoint.

    Returns:
        The JSON value, and the tensors by their names in a checkpoint. They share memory with those of the state where they can.

    Raises:
        CheckpointError: Something in the state is of another type. Says where, and what instead.
    """
    packer = _Packer(prefix)
    return packer.pack(state, ()), packer.tensors


def unpack(json_value: Any, read: Callable[[str], Tensor]) -> Any:
    """The state that `pack` was given.

    Args:
        json_value: From `pack`.
        read: Returns the tensor of a name.

    Raises:
        CheckpointError: The JSON is not from `pack`.
    """
    if isinstance(json_value, list):
        return [unpack(item, read) for item in json_value]
    if not isinstance(json_value, dict):
        return json_value
    marker = next(iter(json_value), "")
    if not marker.startswith("$"):
        return {key: unpack(value, read) for key, value in json_value.items()}
    try:
        return _MARKERS[marker](json_value[marker], read)
    except (KeyError, TypeError, ValueError) as problem:
        raise CheckpointError(
            f"the saved state holds {json_value!r:.80}, which this version does not know ({type(problem).__name__}: {problem}); "
            "load it with the version of unishard that wrote it"
        ) from problem


_MARKERS: dict[str, Callable[[Any, Callable[[str], Tensor]], Any]] = {
    "$items": lambda items, read: {unpack(key, read): unpack(value, read) for key, value in items},
    "$tuple": lambda items, read: tuple(unpack(item, read) for item in items),
    "$int": lambda text, read: int(text, 16),
    "$float": lambda text, read: float(text),
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
            bytes: self._bytes,
            tuple: lambda value, path: {"$tuple": self._list(value, path)},
        }
        """What may be the key of a dict as well. Subclasses, such as enums and named tuples, would not come back as such."""
        self._others: dict[type, Callable[[Any, _Path], Any]] = {
            Tensor: self._tensor,
            np.ndarray: self._array,
            np.generic: self._scalar,
            Mapping: self._dict,
        }

    def pack(self, value: Any, path: _Path) -> Any:
        if len(path) > _DEEPEST:
            raise CheckpointError(
                f"state.{_dotted(path[:5])}... is nested deeper than {_DEEPEST} levels, or holds itself; save what is in it"
            )
        if type(value) is list:
            return self._list(value, path)
        pack = self._plain.get(type(value)) or next((pack for kind, pack in self._others.items() if isinstance(value, kind)), None)
        if pack is None:
            has_state = callable(getattr(value, "state_dict", None))
            raise _refusal(path, value, "its state_dict()" if has_state else "a dict, list, tuple, string, number or tensor made of it")
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
        if value.layout is not torch.strided or value.is_quantized or value.device.type == "meta":
            raise _refusal(path, value, "a dense tensor on a CPU or GPU", f"is {value.layout} on {value.device}, of type")
        return {"$tensor": self._name(value.detach(), path)}

    def _array(self, value: np.ndarray[Any, Any], path: _Path) -> dict[str, Any]:
        try:
            tensor = torch.from_numpy(np.array(value))  # a copy: torch takes no negative strides and warns of read-only memory
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

    def _bytes(self, value: bytes, path: _Path) -> dict[str, Any]:
        return {"$bytes": self._name(torch.tensor(bytearray(value), dtype=torch.uint8), path)}

    def _name(self, tensor: Tensor, path: _Path) -> str | list[Any]:
        """Where the tensor lies, told apart from another one whose path is spelled alike."""
        if not tensor.numel():  # no rank could write it
            return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
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
    dtype, shape = name
    return torch.empty(shape, dtype=getattr(torch, dtype))


def _string(value: str, path: _Path) -> str:
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise CheckpointError(
            f"state.{_dotted(path)}: {value!a:.80} holds half a character (a lone surrogate), which no file can; save bytes instead"
        )
    return value


def _refusal(path: _Path, value: Any, instead: str, how: str = "is a") -> CheckpointError:
    return CheckpointError(
        f"state.{_dotted(path)} {how} {type(value).__name__}, which is neither JSON nor a tensor; save {instead} instead"
    )


def _dotted(path: _Path) -> str:
    return ".".join(map(str, path)) or "value"
