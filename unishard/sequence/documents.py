"""Where the documents of packed samples begin and end, as facts of the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from unishard.errors import DataError

Documents = tuple[tuple[int, int], ...]
"""Beginnings and ends of the documents of one sample, which cover it."""


def documents_of(positions: Tensor, mask: Tensor | None) -> list[Documents]:
    """The documents of each sample. Waits for the device.

    As in transformers, a position that is not one more than the last begins a document, unless there is a mask; then
    what is masked at either end is apart.

    Args:
        positions: `[batch, sequence]`, of whole samples.
        mask: `[batch, sequence]`, nonzero for tokens and 0 for padding.

    Raises:
        DataError: The mask has zeros between tokens.
    """
    if mask is not None:
        kept = mask != 0
        borders = kept[:, 1:] != kept[:, :-1]
    else:
        borders = positions[:, 1:] != positions[:, :-1] + 1
    length = positions.shape[1]
    starts: list[list[int]] = [[0] for _ in range(len(positions))]
    for row, place in torch.nonzero(borders).tolist():
        starts[row].append(place + 1)
    documents = [tuple(zip(begins, [*begins[1:], length], strict=True)) for begins in starts]
    if mask is not None:
        _require_no_holes(mask, documents)
    return documents


def alike(documents: Sequence[Documents]) -> Iterator[tuple[slice, Documents]]:
    """Neighboring samples with the same documents."""
    first = 0
    for of_rows, group in groupby(documents):
        number = sum(1 for _ in group)
        yield slice(first, first + number), of_rows
        first += number


def numbers_of(documents: Sequence[Documents]) -> Tensor:
    """Which of its sample's documents each position belongs to, `[batch, sequence]`."""
    return torch.stack(
        [
            torch.arange(len(spans)).repeat_interleave(torch.tensor([end - start for start, end in spans]))
            for spans in documents
        ]
    )


def _require_no_holes(mask: Tensor, documents: list[Documents]) -> None:
    most = max(len(each) for each in documents)
    if most <= 1:
        return
    firsts = (mask[:, 0] != 0).tolist()
    for first, spans in zip(firsts, documents, strict=True):
        tokens = len(spans[0 if first else 1 :: 2])
        if tokens > 1:
            raise DataError(
                "attention_mask has zeros between tokens, which parallel.sequence does not support; pad at one end of "
                "each sample"
            )
