"""The exchange of digests among all ranks, in a few rounds. It uses gloo, also beside NCCL, so that it never waits for
a device.

Its messages have other tags than the main thread's collectives in the same group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unishard.distributed.process_group import host_group

_RADIX = 8
"""Up to this many ranks exchange digests in one round; more ranks need log(ranks) rounds."""
_ABSENT = 2**40
"""A digest that no call has: a rank that receives it raises."""


class _Sent(NamedTuple):
    """A digest that this rank has sent without waiting for the others' digests."""

    number: int
    digest: int
    sending: list[tuple[Any, Tensor]]
    receiving: list[tuple[Any, Tensor]]


class DigestExchange:
    """One rank's part of it."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._group = host_group()
        self._rounds = list(_rounds(size))
        self.number = 0
        """Digests that this rank has sent."""
        self._sent: list[_Sent] = []
        self._absent = False
        """Whether the others have been told that this rank makes no call any more."""

    def compare(self, digest: int, time: int) -> tuple[bool, int]:
        """Whether all ranks have the same digest, and the longest time of all ranks. Collective."""
        self.number += 1
        least = largest = digest
        for stage, distances in enumerate(self._rounds):
            sending, receiving = self._stage(
                stage, distances, torch.tensor([least, largest, time], dtype=torch.int64, device="cpu")
            )
            for work, theirs in receiving:
                work.wait()
                low, high, other = theirs.tolist()
                least, largest, time = min(least, low), max(largest, high), max(time, other)
            for work, _ in sending:
                work.wait()
        return least == largest, time

    def send(self, digest: int) -> None:
        """Send a digest to all ranks that this rank sends to in any round, without waiting."""
        self.number += 1
        sending, receiving = [], []
        mine = torch.tensor([digest, digest, 0], dtype=torch.int64, device="cpu")
        try:
            for stage, distances in enumerate(self._rounds):
                out, back = self._stage(stage, distances, mine)
                sending += out
                receiving += back
        except RuntimeError:  # another rank is gone already, and reports its own error
            pass
        self._sent.append(_Sent(self.number, digest, sending, receiving))

    def say_absent(self) -> None:
        """Release ranks that wait for this one; nothing can be compared any more."""
        if not self._absent:
            self._absent = True
            self.send(_ABSENT)

    def first_different(self) -> int | None:
        """Receive the others' digests for those that this rank has only sent.

        Returns:
            The number of the first that differs; what was sent after it is not received. None if all are equal.
        """
        while self._sent:
            number, digest, sending, receiving = self._sent.pop(0)
            for work, _ in (*receiving, *sending):
                work.wait()
            if digest == _ABSENT or any(value != digest for _, theirs in receiving for value in theirs.tolist()[:2]):
                return number
        return None

    def _stage(
        self, stage: int, distances: list[int], mine: Tensor
    ) -> tuple[list[tuple[Any, Tensor]], list[tuple[Any, Tensor]]]:
        rank, size, group = self._rank, self._size, self._group
        sending = [(group.send([mine], (rank + distance) % size, stage), mine) for distance in distances]
        receiving = []
        for distance in distances:
            theirs = torch.empty(3, dtype=torch.int64, device="cpu")
            receiving.append((group.recv([theirs], (rank - distance) % size, stage), theirs))
        return sending, receiving


def _rounds(size: int) -> Iterator[list[int]]:
    """Distances to the peers of each round of a dissemination exchange, after which every rank has heard of every
    other.
    """
    step = 1
    while step < size:
        yield [step * turn for turn in range(1, _RADIX) if step * turn < size]
        step *= _RADIX
