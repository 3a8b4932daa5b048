"""Move pieces of a space in a file through a few buffers: one thread reads ahead, another writes behind.

```text
reader | piece 1 | piece 2 | piece 3 |
caller           | step 1  | step 2  | step 3 |
writer                     | piece 1 | piece 2 | piece 3 |
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from unishard.contract.footprint import PIECES_IN_MEMORY
from unishard.nvme.rank_file import ALIGNED, RankFile, aligned_buffer

OVERLAP = ALIGNED
"""Elements that a piece has in common with the next, where a tensor may be cut a little later."""


_Cuts = TypeVar("_Cuts")


class Streams:
    """The buffers and the threads."""

    def __init__(
        self, file: RankFile, starts: Mapping[str, int], dtypes: Mapping[str, torch.dtype], piece: int
    ) -> None:
        """Allocate the buffers.

        Args:
            file: Has a region for each key.
            starts: Where each begins, in bytes.
            dtypes: Of the elements of each.
            piece: Elements that are moved together, of which a region has a multiple, and `OVERLAP` more.
        """
        self._file, self._starts, self._dtypes, self._piece = file, starts, dtypes, piece
        self._slots = [
            {key: aligned_buffer((piece + OVERLAP) * dtype.itemsize) for key, dtype in dtypes.items()}
            for _ in range(PIECES_IN_MEMORY)
        ]
        self._reader = ThreadPoolExecutor(1, "unishard-nvme-read")
        self._writer = ThreadPoolExecutor(1, "unishard-nvme-write")
        self._slot_of: dict[int, int] = {}
        """By the number of a piece."""
        self._reads: dict[int, Future[None]] = {}
        """By the number of a piece."""
        self._writes: dict[int, Future[None]] = {}
        """By slot."""
        self._unread: Iterator[int] = iter(())
        self._last: int | None = None
        """The piece that was taken last."""

    def move(self, pieces: Mapping[int, _Cuts], step: Callable[[_Cuts, Mapping[str, Tensor]], None]) -> None:
        """Read pieces, and write them after they were stepped; when it returns, the file has everything.

        Args:
            pieces: By their numbers, in ascending order, what lies in each.
            step: Gets that, and the piece by key.
        """
        self._slot_of = {number: place % PIECES_IN_MEMORY for place, number in enumerate(pieces)}
        self._unread, self._last = iter(pieces), None
        for _ in range(PIECES_IN_MEMORY - 1):
            self._read_ahead()
        try:
            for number, cuts in pieces.items():
                step(cuts, self._take(number))
                self._put(number)
        finally:
            self._end()

    def close(self) -> None:
        """End the threads."""
        self._reader.shutdown()
        self._writer.shutdown()

    def _take(self, number: int) -> dict[str, Tensor]:
        self._reads.pop(number).result()
        held = self._held(number)
        if self._last is not None and self._last == number - 1:
            for key, before in self._held(number - 1).items():
                held[key][:OVERLAP] = before[self._piece :]
        self._last = number
        self._read_ahead()  # into the buffers of the piece before
        return held

    def _held(self, number: int) -> dict[str, Tensor]:
        slot = self._slots[self._slot_of[number]]
        return {key: slot[key][1].view(dtype) for key, dtype in self._dtypes.items()}

    def _put(self, number: int) -> None:
        slot = self._slot_of[number]
        self._writes[slot] = self._writer.submit(self._write, number, slot)

    def _end(self) -> None:
        """Wait until the file has everything."""
        for read in self._reads.values():  # of an update that has failed
            if not read.cancel():
                read.exception()
        self._reads.clear()
        while self._writes:
            self._writes.popitem()[1].result()

    def _read_ahead(self) -> None:
        number = next(self._unread, None)
        if number is not None:
            self._reads[number] = self._reader.submit(self._read, number)

    def _read(self, number: int) -> None:
        slot = self._slot_of[number]
        if slot in self._writes:
            self._writes.pop(slot).result()
        for key, (memory, _) in self._slots[slot].items():
            self._file.read(self._place(key, number), memory)

    def _write(self, number: int, slot: int) -> None:
        for key, (memory, _) in self._slots[slot].items():
            self._file.write(self._place(key, number), memory)

    def _place(self, key: str, number: int) -> int:
        return self._starts[key] + number * self._piece * self._dtypes[key].itemsize
