"""Shares through the process group's store where each rank is, for the messages of `unishard.distributed.collective_check`."""

from __future__ import annotations

import sys
import sysconfig
import time
import traceback
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

__all__ = ["Places", "describe", "stack_of"]

_ENGINE = str(Path(__file__).parents[1] / "engine")
"""On the stack of every call of an engine."""
_PACKAGE = str(Path(__file__).parents[1])
_INSTALLED = tuple({sysconfig.get_path("stdlib"), *(sysconfig.get_path(name) for name in ("purelib", "platlib"))})
_COLLECTIVES = str(Path(dist.__file__).parent)


class Places:
    """One line of text for each rank and check, written by that rank and readable by all.

    Uses its own connection: a waiting request blocks all others on the same connection.
    """

    def __init__(self, store: Any, rank: int, world: int) -> None:
        """Create it, without any lines.

        Args:
            store: The `torch.distributed.Store` of a process group that is used for nothing else.
            rank: This rank.
            world: Number of ranks.
        """
        self._store = dist.PrefixStore("unishard/desync", store.clone())  # type: ignore[attr-defined]  # exported without __all__ (torch 2.13)
        self._rank, self._world = rank, world
        self._ended = False
        """Whether the rank that serves the store is gone; torch then warns on every request."""

    def ask(self, check: int) -> None:
        """Ask every rank that has not reached this check where it is."""
        self._set(f"asked/{check}", "")

    def asked(self, check: int) -> bool:
        """Whether a rank waiting at this check has asked where the others are."""
        if self._ended:
            return False
        try:
            return bool(self._store.check([f"asked/{check}"]))
        except RuntimeError:
            self._ended = True
            return False

    def tell(self, check: int, kind: str, text: str) -> None:
        """Write where this rank is."""
        self._set(f"{kind}/{check}/{self._rank}", text)

    def _set(self, key: str, text: str) -> None:
        if self._ended:
            return
        try:
            self._store.set(key, text)
        except RuntimeError:
            self._ended = True

    def read(self, check: int, kind: str, seconds: float) -> dict[int, str]:
        """The lines that the ranks have written, after waiting this long for missing ones; ranks without a line are absent."""
        found, end = {}, time.monotonic() + seconds
        for rank in range(self._world):
            try:
                self._store.wait([f"{kind}/{check}/{rank}"], timedelta(seconds=max(end - time.monotonic(), 0.001)))
                found[rank] = self._store.get(f"{kind}/{check}/{rank}").decode(errors="replace")
            except RuntimeError:  # DistStoreError: a timeout, or the store is gone
                continue
        return found


def describe(places: Mapping[int, str], silent: Iterable[int], last: str) -> str:
    """A list of ranks by place, then the ranks that gave no answer, with the last place common to all."""
    together: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        together.setdefault(place, []).append(rank)
    lines = [f"{_ranks(ranks)} {_of_several(place) if len(ranks) > 1 else place}" for place, ranks in together.items()]
    if missing := sorted(silent):
        lines.append(f"{_ranks(missing)} {'is' if len(missing) == 1 else 'are'} gone or gave no answer, last seen {last.partition(' ')[2]}")
    return "; ".join(lines)


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"


def _of_several(place: str) -> str:
    verb, _, rest = place.partition(" ")
    return {"is": "are", "has": "have", "waits": "wait"}.get(verb, verb) + " " + rest


def stack_of(thread: int) -> tuple[str, bool, bool]:
    """Where a thread of this process is.

    Returns:
        `file:line in function` of the innermost frame of the user's code, whether the thread is in a call of an engine, and whether it is
        in torch.distributed outside such a call.
    """
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "nowhere: its thread has ended", False, False
    frames = traceback.extract_stack(frame)
    inside = any(entry.filename.startswith(_ENGINE) for entry in frames)
    waiting = not inside and any(entry.filename.startswith(_COLLECTIVES) for entry in frames)
    own = [entry for entry in frames if not entry.filename.startswith((_PACKAGE, "<", *_INSTALLED))]
    entry = (own or frames)[-1]
    return f"{Path(entry.filename).name}:{entry.lineno} in {entry.name}", inside, waiting
