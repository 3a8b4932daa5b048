"""Checks that all ranks hold the same values: one all-reduce of 64 bytes while they do, whatever the number of
ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from unishard.distributed.devices import of_numbers
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
    if not _same(hashlib.sha256(repr(texts).encode()).digest()):
        raise RankMismatchError(
            f"ranks hold different {subject}; start every rank with the same:\n{_differences(texts)}"
        )


def _same(digest: bytes) -> bool:
    """Whether all ranks have one digest: its least and its largest value are the same. Collective."""
    words = [int.from_bytes(digest[at : at + 7], "big") for at in range(0, 28, 7)]
    both = torch.tensor([*words, *(-word for word in words)], dtype=torch.int64, device=of_numbers())
    dist.all_reduce(both, dist.ReduceOp.MIN)
    least = both.tolist()
    return all(low == -high for low, high in zip(least[:4], least[4:], strict=True))


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
