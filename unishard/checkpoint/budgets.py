"""What a short file may ask of its reader: its length decides how much it can mean.

A pickle refers to its own parts, so 400 bytes can mean a tuple of 2^100 elements, whose hash never ends. What a genuine
file means is about as long as the file, so a reader counts its steps and ends where they are far more.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

from unishard.errors import CheckpointError

_STEPS, _STEPS_A_BYTE = 1 << 20, 4
"""Steps of any file, and further ones for each of its bytes. In genuine files a value takes one, and has more than one
byte."""
MOST_DIMS = 64
"""Dimensions of a tensor: torch's own limit (torch 2.13, c10/core/TensorImpl.h)."""
MOST_NAMES = 128
"""Names of a record of a checkpoint: tied parameters share one."""
_SCALARS = (str, int, float, bool, bytes, type(None))
_ABSURD = "means far more than its size; the file may be malicious, do not open it"


def steps_of(size: int) -> int:
    """How many steps a file may take.

    Args:
        size: Its bytes.
    """
    return _STEPS + _STEPS_A_BYTE * size


def require_small(value: Any, size: int) -> None:
    """Check that lists, tuples and dicts hold no more than the file that they are from, counted wherever they are
    referred to.

    Args:
        value: From the file.
        size: Bytes of the file.

    Raises:
        CheckpointError: They hold far more.
    """
    _count([value], steps_of(size))


def _count(values: Sequence[Any], most: int, kinds: tuple[type, ...] = (list, tuple, dict)) -> int:
    """The number of values, those inside others included; at most so many."""
    total = 0
    left: list[Any] = [values]
    while left:
        inside = left.pop()
        total += 1 + len(inside)
        if total > most:
            refuse(_ABSURD)
        left += [value.values() if isinstance(value, dict) else value for value in inside if isinstance(value, kinds)]
    return total


def refuse(problem: str) -> NoReturn:
    """Raise the error of a file; its reader adds the path."""
    raise CheckpointError(problem)


class BoundedUnpickler(pickle._Unpickler):
    """Takes time in proportion to the length of a pickle. A subclass says which classes it admits.

    It is Python's own unpickler, not the one in C, whose memo takes any amount of memory for a damaged pickle (Python
    3.11).
    """

    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def __init__(self, data: bytes) -> None:
        """Prepare to read a pickle. `load` raises CheckpointError for one that takes too many steps."""
        super().__init__(io.BytesIO(data))
        self._left = steps_of(len(data))

    def is_key(self, value: Any) -> bool:
        """Whether an object may be a key of a dictionary: it must be hashed and compared in few steps."""
        return False

    def note_call(self, function: Any, arguments: tuple[Any, ...]) -> None:
        """Look at a call before it is made."""

    def _spend(self, values: Sequence[Any]) -> None:
        """Count the elements of the tuples among some values.

        A tuple without tuples in it has taken as many bytes of the pickle as it has elements.
        """
        if nested := [value for value in values if isinstance(value, tuple)]:
            self._left -= _count(nested, self._left, (tuple,))

    def _check_keys(self, keys: Sequence[Any]) -> None:
        self._spend(keys)
        for key in keys:
            if not (isinstance(key, _SCALARS) or self.is_key(key) or _is_flat(key)):
                refuse(f"has a key of the type {type(key).__name__}; the file may be malicious, do not open it")

    def _check_call(self) -> None:
        function, arguments = self.stack[-2:]
        if not callable(function) or not isinstance(arguments, tuple):
            refuse("calls what is no function; it is damaged")
        self._left -= len(arguments)
        self._spend(arguments)
        for argument in arguments:
            if isinstance(argument, list):
                self._check_keys(argument)  # the elements of a set
        self.note_call(function, arguments)

    def _check_build(self) -> None:
        """BUILD sets attributes of an object, but never of a class: a file must not change classes of this process."""
        if isinstance(self.stack[-2], type):
            refuse("modifies a class; the file may be malicious, do not open it")


def _is_flat(key: Any) -> bool:
    return isinstance(key, tuple) and all(isinstance(part, _SCALARS) for part in key)


def _checked(code: int, check: Callable[[BoundedUnpickler], None]) -> Callable[[BoundedUnpickler], None]:
    act = BoundedUnpickler.dispatch[code]

    def load(self: BoundedUnpickler) -> None:
        check(self)
        act(self)

    return load


_CHECKS: dict[bytes, Callable[[BoundedUnpickler], None]] = {
    pickle.TUPLE: lambda self: self._spend(self.stack),
    pickle.TUPLE1: lambda self: self._spend(self.stack[-1:]),
    pickle.TUPLE2: lambda self: self._spend(self.stack[-2:]),
    pickle.TUPLE3: lambda self: self._spend(self.stack[-3:]),
    pickle.SETITEM: lambda self: self._check_keys(self.stack[-2:-1]),
    pickle.SETITEMS: lambda self: self._check_keys(self.stack[::2]),
    pickle.DICT: lambda self: self._check_keys(self.stack[::2]),
    pickle.REDUCE: BoundedUnpickler._check_call,
    pickle.NEWOBJ: BoundedUnpickler._check_call,
    pickle.BUILD: BoundedUnpickler._check_build,
}
_UNUSED = (
    pickle.BYTEARRAY8,
    pickle.LONG4,
    pickle.EMPTY_SET,
    pickle.ADDITEMS,
    pickle.FROZENSET,
    pickle.INST,
    pickle.OBJ,
    pickle.NEWOBJ_EX,
)
"""No genuine file has them. They allocate what they name, hash what they hold, or call what the checks above do not
see."""
BoundedUnpickler.dispatch.update({code[0]: _checked(code[0], check) for code, check in _CHECKS.items()})
for _code in _UNUSED:
    del BoundedUnpickler.dispatch[_code[0]]
