"""Finds where a step waits for the device: seen on the CPU, where each such operation only reads memory.

Seen are reads of a tensor's value (`item`, `float`, `bool`, `tolist`, `cpu`, `numpy`), operations whose result has a
size that depends on data, and tensors that are made of Python numbers for the engine's device: on CUDA such a copy
comes from pageable memory and waits. The desync check and `host_numbers` compute on the host, over gloo, on every
device, so what they read is not counted.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_TESTS = Path(__file__).parents[1]
_PACKAGES = {
    name: Path(*find_spec(name).submodule_search_locations)
    for name in ("unishard", "unishard_fsdp", "unishard_deepspeed", "deepspeed", "torch")
}
"""Their folders: that of a checkout may have the same name as one of them."""
_READS = (
    "_local_scalar_dense",
    "equal",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
)
_METHODS = ("tolist", "cpu", "numpy")
_ON_THE_HOST = ("unishard/failures/digest_exchange.py", "unishard/distributed/host_numbers.py")
DEFERRED = "unishard/distributed/host_read.py"
"""Waits there for what was copied to pinned memory earlier, behind which the device has more to do."""


class Wait(NamedTuple):
    """A place that waits for the device."""

    phase: str
    """`batches`, `forward`, `backward` or `step`."""
    owner: str
    """`unishard`, `deepspeed`, or another package that calls torch."""
    place: str
    """`file:line operation`, with the line that called a deferred read."""
    function: str
    """That the line is in."""
    deferred: bool


class Waits:
    """Counts waits while it is open."""

    def __init__(self) -> None:
        self.phase = "batches"
        self.found: Counter[Wait] = Counter()

    def add(self, operation: str) -> None:
        frames = [(*_short(frame.f_code.co_filename), frame) for frame in _frames()]
        known = [
            (package, name, frame) for package, name, frame in frames if package not in ("torch", "python", "test")
        ]
        if not known or any(name in _ON_THE_HOST for _, name, _ in known[:2]):
            return
        deferred = known[0][1] == DEFERRED
        package, name, frame = next((each for each in known if each[1] != DEFERRED), known[0])
        self.found[
            Wait(self.phase, package, f"{name}:{frame.f_lineno} {operation}", frame.f_code.co_name, deferred)
        ] += 1

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name in _METHODS:
                stack.enter_context(mock.patch.object(torch.Tensor, name, self._method(name)))
            for name in ("tensor", "as_tensor"):
                stack.enter_context(mock.patch.object(torch, name, self._factory(name)))
            stack.enter_context(_Reads(self))
            yield

    def _method(self, name: str) -> Any:
        original, add = getattr(torch.Tensor, name), self.add

        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            add(name)
            return original(tensor, *args, **kwargs)

        return call

    def _factory(self, name: str) -> Any:
        original, add = getattr(torch, name), self.add

        def call(data: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(kwargs.get("device"), torch.device) and not isinstance(data, torch.Tensor):
                add(f"torch.{name}")  # "cpu" in words would stay there
            return original(data, *args, **kwargs)

        return call


class _Reads(TorchDispatchMode):
    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.partition("::")[2]
        if name in _READS:
            self._waits.add(name)
        return function(*args, **(kwargs or {}))


def _frames() -> Iterator[Any]:
    frame = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _short(path: str) -> tuple[str, str]:
    """The package of a file, and its path from there."""
    if path.startswith(f"{_TESTS}/"):
        return "test", path
    for package, folder in _PACKAGES.items():
        if path.startswith(f"{folder}/"):
            return package.partition("_")[0], str(Path(path).relative_to(folder.parent))
    return "python", path
