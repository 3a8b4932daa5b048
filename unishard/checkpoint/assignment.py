"""Which rank writes what, planned by rank 0. Each interval is written once, also if several ranks hold it, and no
element is left out.

torch's own planner makes several objects for each chunk, and 70 billion parameters on 1,024 ranks have two million
chunks. Here a chunk is a row of arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from unishard.checkpoint.box_tables import box_table
from unishard.checkpoint.holdings import Numbers, StoredTensor, cut, tensors_in, unpacked


class Places:
    """Where the boxes of each tensor lie, sorted by their first element."""

    def __init__(self, tensors: Sequence[StoredTensor], bounds: Numbers, columns: Sequence[Numbers]) -> None:
        """Keep the columns.

        Args:
            tensors: In any order.
            bounds: First row of each tensor, and the number of rows.
            columns: First element, one past the last, rank, first byte in the rank's file, number of bytes.
        """
        self.tensors = tensors
        self._bounds, self._columns = bounds, columns

    def of(self, number: int) -> list[Numbers]:
        """The columns of a tensor, by its place in the list."""
        return [column[self._bounds[number] : self._bounds[number + 1]] for column in self._columns]


class Assignment:
    """What each rank writes."""

    def __init__(self, everyone: Sequence[tuple[bytes, bytes]], chunk: int) -> None:
        """Plan.

        Args:
            everyone: What each rank holds, as `holdings.packed` makes it.
            chunk: Bytes of the intervals that are written as one.

        Raises:
            ValueError: Elements of a tensor are missing, are held in intervals that overlap, or ranks name tensors of
                other kinds.
        """
        self._number: dict[str, int] = {}
        tensors: list[StoredTensor] = []
        self.numbers = _numbered(everyone, self._number, tensors)
        """For each rank, the numbers of its tensors."""
        self._tensors = tensors
        cuts = [
            cut(unpacked(tuple(tensors[number] for number in numbers), sent), chunk)
            for numbers, (_, sent) in zip(self.numbers, everyone, strict=True)
        ]
        counts = [len(part.tensor) for part in cuts]
        tensor = np.concatenate([numbers[part.tensor] for numbers, part in zip(self.numbers, cuts, strict=True)])
        begin, end = np.concatenate([part.begins for part in cuts]), np.concatenate([part.ends for part in cuts])
        rank = np.repeat(np.arange(len(everyone)), counts)
        order = np.lexsort((begin, tensor))  # stable: equal intervals in the order of ranks
        groups = _starts(tensor[order], begin[order])
        sizes = np.diff(np.append(groups, len(order)))
        self._require_whole(tensor[order], begin[order], end[order], groups)
        itemsizes = np.array([stored.dtype.itemsize for stored in tensors], np.int64)
        first_in_group = order[groups]
        bytes_ = (end - begin)[first_in_group] * itemsizes[tensor[first_in_group]]
        written = order[groups + _holders(rank[order], groups, sizes, bytes_, len(everyone))]
        chosen = np.zeros(len(order), bool)
        chosen[written] = True
        self.masks = [np.packbits(chosen[first:last]).tobytes() for first, last in pairwise(np.cumsum([0, *counts]))]
        """For each rank, which of its cuts it writes, in bits."""
        self._lay_out(tensor[written], begin[written], end[written], rank[written], written)

    @property
    def tensors(self) -> list[StoredTensor]:
        """All tensors, in the order in which ranks write them."""
        return [self._tensors[number] for number in self._order]

    def places(self, lengths: Sequence[Any], begins: Any) -> Places:
        """Where everything lies.

        Args:
            lengths: Of each rank, the lengths of its records in the order in which it wrote them.
            begins: Of each rank, where the first of them begins in its file.

        Raises:
            ValueError: A rank has written another number of records.
        """
        counts = [len(rank_lengths) for rank_lengths in lengths]
        if counts != self._records.tolist():
            raise ValueError("a rank has not written the records that it was to write")
        length = np.concatenate([*lengths, np.empty(0, np.int64)]).astype(np.int64)
        at = np.cumsum(length) - length
        at += np.repeat(np.asarray(begins, np.int64) - np.append(at, 0)[np.cumsum(counts) - counts], counts)
        ordered = [self._tensors[number] for number in self._order]
        columns = [self._first, self._last, self._rank, at[self._record], length[self._record]]
        rows = np.concatenate(
            [np.arange(*self._bounds[number : number + 2]) for number in self._order] or [np.empty(0, np.int64)]
        )
        sizes = [int(self._bounds[number + 1] - self._bounds[number]) for number in self._order]
        return Places(ordered, np.cumsum([0, *sizes]), [column[rows] for column in columns])

    def added(self, values: Sequence[Any]) -> list[Any]:
        """The sum of each tensor's values.

        Args:
            values: Of each rank, an array with a value for each tensor that it holds.
        """
        total = np.zeros(len(self._tensors), values[0].dtype)
        for numbers, rank_values in zip(self.numbers, values, strict=True):
            total[numbers] += rank_values  # integers wrap, which is modulo 2^64
        return total[self._order].tolist() if self._order else []

    def _lay_out(self, tensor: Numbers, begin: Numbers, end: Numbers, rank: Numbers, written: Numbers) -> None:
        """Divide the intervals, which are sorted by tensor and element, into boxes, and find the record of each in the
        ranks' files.
        """
        bounds = np.searchsorted(tensor, np.arange(len(self._tensors) + 1))
        tables = [
            box_table(stored.shape, begin[first:last], end[first:last], stored.order)
            for stored, (first, last) in zip(self._tensors, pairwise(bounds), strict=True)
        ]
        source = np.concatenate(
            [table.source + first for table, first in zip(tables, bounds, strict=False)] or [np.empty(0, np.int64)]
        )
        self._first = np.concatenate([table.first for table in tables] or [np.empty(0, np.int64)])
        self._last = np.concatenate([table.last for table in tables] or [np.empty(0, np.int64)])
        self._bounds = np.cumsum([0, *(len(table.first) for table in tables)])
        self._rank = rank[source]
        self._records = np.bincount(self._rank, minlength=len(self.masks))
        # A rank writes its intervals in the order in which it holds them, and the boxes of each in their own.
        boxes, sequence = np.bincount(source, minlength=len(tensor)), np.argsort(written)
        begins = np.empty(len(tensor), np.int64)
        begins[sequence] = np.cumsum(boxes[sequence]) - boxes[sequence]
        self._record = begins[source] + np.arange(len(source)) - (np.cumsum(boxes) - boxes)[source]
        earliest = np.minimum.reduceat(written, bounds[:-1]) if len(self._tensors) else np.empty(0, np.int64)
        self._order = np.argsort(earliest).tolist()

    def _require_whole(self, tensor: Numbers, begin: Numbers, end: Numbers, groups: Numbers) -> None:
        """Check that the sorted intervals cover each tensor once."""
        same = np.repeat(groups, np.diff(np.append(groups, len(end))))
        self._refuse("ranks hold overlapping elements of", tensor[end != end[same]])
        tensor, begin, end = tensor[groups], begin[groups], end[groups]
        self._refuse("no rank holds some or all elements of", np.setdiff1d(np.arange(len(self._tensors)), tensor))
        fresh = np.append(True, tensor[1:] != tensor[:-1])[: len(tensor)]
        expected = np.where(fresh, 0, np.append(0, end[:-1])[: len(tensor)])
        numel = np.array([math.prod(stored.shape) for stored in self._tensors], np.int64)
        self._refuse("ranks hold overlapping elements of", tensor[begin < expected])
        self._refuse("no rank holds some or all elements of", tensor[begin > expected])
        self._refuse(
            "no rank holds some or all elements of",
            tensor[np.append(fresh[1:], True)[: len(tensor)] & (end != numel[tensor])],
        )

    def _refuse(self, problem: str, tensors: Numbers) -> None:
        if len(tensors):
            raise ValueError(f"{problem} {self._tensors[int(tensors[0])].name}")


def _numbered(
    everyone: Sequence[tuple[bytes, bytes]], number: dict[str, int], all_tensors: list[StoredTensor]
) -> list[Numbers]:
    """Number all tensors; those that many ranks name in the same bytes are read once."""
    known: dict[bytes, Numbers] = {}
    for sent, _ in everyone:
        if sent in known:
            continue
        tensors = tensors_in(sent)
        for tensor in tensors:
            if number.setdefault(tensor.name, len(all_tensors)) == len(all_tensors):
                all_tensors.append(tensor)
            elif all_tensors[number[tensor.name]] != tensor:
                raise ValueError(f"ranks hold {tensor.name} with different dtypes or shapes")
        known[sent] = np.array([number[tensor.name] for tensor in tensors], np.int64)
    return [known[sent] for sent, _ in everyone]


def _starts(*columns: Numbers) -> Numbers:
    """Where rows differ from the row before."""
    differs = np.ones(len(columns[0]), bool)
    differs[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return np.flatnonzero(differs)


def _holders(rank: Numbers, groups: Numbers, sizes: Numbers, bytes_: Numbers, world: int) -> Numbers:
    """Which of the ranks that hold an interval writes it: the one that writes the fewest bytes so far."""
    chosen, single = np.zeros(len(groups), np.int64), sizes == 1
    load = np.bincount(rank[groups[single]], weights=bytes_[single], minlength=world)
    for group in np.flatnonzero(~single).tolist():
        holders = rank[groups[group] : groups[group] + sizes[group]]
        chosen[group] = np.argmin(load[holders])
        load[holders[chosen[group]]] += bytes_[group]
    return chosen
