"""Wrappers around a loader: progress bars, `enumerate`, `islice`, prefetchers."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterable
from types import GeneratorType
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from unishard.data.loader import ShareLoader

_DEPTH = 4
"""How many wrappers may be around each other."""
_BUILT_IN = (
    enumerate,
    zip,
    map,
    filter,
    itertools.islice,
    itertools.chain,
    itertools.cycle,
    itertools.takewhile,
    type(iter(())),
    GeneratorType,
)
"""Iterators that begin to read when they are created, or that do not expose what they read."""
_INSTEAD = {
    "enumerate": "write enumerate(engine.batches(loader))",
    "islice": "write itertools.islice(engine.batches(loader), n)",
    "zip": "read one dataset of both, such as unishard.dataloader(torch.utils.data.StackDataset(a, b), cfg)",
    "chain": "read one dataset of both, such as unishard.dataloader(torch.utils.data.ConcatDataset([a, b]), cfg)",
}


def unwrapped(loader: Iterable[Any]) -> Iterable[Any]:
    """The loader inside a progress bar of tqdm, or the only `unishard.dataloader` inside another object. Without one,
    `loader` itself.
    """
    inner = _inner(loader, _DEPTH)
    return loader if inner is None else inner


def _inner(loader: Any, depth: int) -> Any:
    if (
        isinstance(loader, DataLoader)
        or not depth
        or not hasattr(type(loader), "__iter__")
        or isinstance(loader, nn.Module)
    ):
        return loader if isinstance(loader, DataLoader) else None
    if type(loader).__module__.partition(".")[0] == "tqdm":
        shown = getattr(loader, "iterable", None)
        return _inner(shown, depth - 1) or shown
    loaders = {
        id(inner): inner
        for value in getattr(loader, "__dict__", {}).values()
        if (inner := _inner(value, depth - 1)) is not None
    }
    shares = [inner for inner in loaders.values() if isinstance(inner, ShareLoader)]
    return shares[0] if len(shares) == 1 else None


def hides_state(loader: Iterable[Any]) -> bool:
    """Whether an iterator such as `enumerate(loader)` or a generator directly reads something that has a position."""
    objects: list[Any] = [loader]
    for _ in range(_DEPTH):
        objects = [inner for outer in objects if isinstance(outer, _BUILT_IN) for inner in _referents(outer)]
        if any(callable(getattr(inner, "state_dict", None)) and _is_read(inner) for inner in objects):
            return True
    return False


def _referents(iterator: Any) -> Iterable[Any]:
    for referent in gc.get_referents(iterator):
        yield from referent if isinstance(referent, tuple) else (referent,)


def _is_read(candidate: Any) -> bool:
    return hasattr(type(candidate), "__iter__") and not isinstance(candidate, nn.Module)


def instead_of(loader: Iterable[Any]) -> str:
    """What to write instead of a wrapper that hides its loader."""
    return _INSTEAD.get(
        type(loader).__name__, "pass the loader itself, engine.batches(loader), and wrap what that yields"
    )
