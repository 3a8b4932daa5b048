"""Whether all ranks hold the same values: one all-reduce of 64 bytes over gloo, whatever the number of ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from unishard.distributed import host_numbers
from unishard.errors import RankMismatchError

_SHOWN = 8
"""Ranks named for each value that differs."""
_MOST = 20
"""Values named."""
_MISSING = "nothing"


def agree(facts: dict[str, Any], subject: str) -> None:
    """Check that all ranks have the same values. Collective; only a digest is sent unless they differ.

    Args:
        facts: Values by name, compared by their `repr`.
        subject: What the values describe, for the message.

    Raises:
        RankMismatchError: On every rank; lists each name that differs, with the values of up to 8 ranks.
    """
    texts = {name: repr(value) for name, value in facts.items()}
    if not equal(texts):
        raise RankMismatchError(
            f"ranks hold different {subject}; start every rank with the same:\n{_differences(texts)}"
        )


def equal(value: Any, group: dist.ProcessGroup | None = None) -> bool:
    """Whether a value has the same `repr` on all ranks of a group with a CPU backend, by default on all. Collective."""
    digest = hashlib.sha256(repr(value).encode()).digest()
    return not differing([int.from_bytes(digest[at : at + 7], "big") for at in range(0, 28, 7)], group)


def differing(numbers: Sequence[int], group: dist.ProcessGroup | None = None) -> list[int]:
    """Which of these numbers of 64 bits, by place, are not the same on all those ranks. Collective."""
    found = host_numbers.largest([*numbers, *(~number for number in numbers)], group)
    largest, least = found[: len(numbers)], [~number for number in found[len(numbers) :]]
    return [place for place in range(len(numbers)) if largest[place] != least[place]]


def _differences(texts: Mapping[str, str]) -> str:
    """The values that differ, one line each.

    Collective: each rank compares with rank 0 and sends what differs; rank 0 tells all.
    """
    rank = dist.get_rank()
    of_rank_0: list[Any] = [{name: _short(text) for name, text in texts.items()} if rank == 0 else None]
    dist.broadcast_object_list(of_rank_0, src=0)
    names = dict.fromkeys((*of_rank_0[0], *texts))
    differing = [name for name in names if of_rank_0[0].get(name) != (_short(texts[name]) if name in texts else None)]
    everyone: list[Any] | None = [None] * dist.get_world_size() if rank == 0 else None
    dist.gather_object({name: texts.get(name, _MISSING) for name in differing[:_MOST]}, everyone, dst=0)
    lines = [_described(texts, everyone) if everyone is not None else ""]
    dist.broadcast_object_list(lines, src=0)
    return lines[0]


def _described(first: Mapping[str, str], others: Sequence[Mapping[str, str]]) -> str:
    """On rank 0: one line for each name that differs.

    Args:
        first: The values of rank 0.
        others: For each rank, what is not as on rank 0.
    """
    differing = dict.fromkeys(name for theirs in others for name in theirs)
    order = [*(name for name in first if name in differing), *(name for name in differing if name not in first)]
    lines = []
    for name in order[:_MOST]:
        values = {rank: theirs[name] for rank, theirs in enumerate(others) if name in theirs}
        shown = range(len(others)) if len(others) <= _SHOWN else sorted({0, *list(values)[: _SHOWN - 1]})
        values_by_rank = [f"rank {rank} has {values.get(rank, first.get(name, _MISSING))}" for rank in shown]
        more = (
            f" and {len(values) + 1 - _SHOWN} more ranks have other values"
            if len(values) >= _SHOWN and len(others) > _SHOWN
            else ""
        )
        lines.append(f"{name}: " + ", ".join(values_by_rank) + more)
    return "\n".join(lines)


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
