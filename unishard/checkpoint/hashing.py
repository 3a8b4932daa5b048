"""A hash of a tensor that does not depend on how it is divided: the same on every engine and any number of ranks.

The tensor's bytes, flattened and padded with zeros, are read as little-endian words of 64 bits; the hash is the sum of
`word[k] * (2 k + 1)` modulo 2^64. A sum over words is a sum over any division of the bytes, each piece alone giving what it adds. Every
weight is odd, so a change of any single word changes the hash, and so does exchanging two words that differ in a bit below the top one.
It guards against misplaced and damaged data, not against an attacker.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from unishard.distributed.shards import Shard

__all__ = ["MASK", "hash_of", "hashes", "hexadecimal"]

MASK = 2**64 - 1
_WORD = 8
_BLOCK = 1 << 17
"""Words that are multiplied at once: 1 MiB, which stays in a processor's cache."""


class _Memory(threading.local):
    """Of one thread, on each device. Memory that is taken for every block anew costs the host more than the arithmetic."""

    def __init__(self) -> None:
        self.of: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The weights of a block, and room for its products."""
        if device not in self.of:
            with torch.inference_mode(False):  # else nobody could write into it outside of that mode
                weights = torch.arange(1, 2 * _BLOCK, 2, dtype=torch.int64, device=device)
                self.of[device] = weights, torch.empty_like(weights)
        return self.of[device]


_memory = _Memory()


def hash_of(values: Tensor, start: int = 0) -> int:
    """What a stretch adds to the hash of its tensor, modulo 2^64.

    Args:
        values: A flat stretch, any dtype and device, contiguous.
        start: Where it begins in the flattened tensor, in elements.
    """
    bytes_ = values.detach().reshape(-1).view(torch.uint8)
    begin = start * values.element_size()
    if not bytes_.numel():
        return 0
    head = min(-begin % _WORD, bytes_.numel())
    words = (bytes_.numel() - head) // _WORD
    total = _edge(bytes_[:head], begin) + _edge(bytes_[head + words * _WORD :], begin + head + words * _WORD)
    body = bytes_[head : head + words * _WORD]
    if body.data_ptr() % _WORD:
        body = body.clone()
    return (total + _sum(body.view(torch.int64), (begin + head) // _WORD)) & MASK if words else total & MASK


def hashes(parts: Mapping[str, Shard], device: torch.device) -> dict[str, int]:
    """Of each whole, from what the ranks hold of it: one all-reduce for each group of ranks. Collective.

    Args:
        parts: The same names in the same order on all ranks of a group.
        device: Where this rank computes.
    """
    found = [hash_of(part.values, part.start if part.group is not None else 0) for part in parts.values()]
    across: dict[dist.ProcessGroup, list[int]] = {}
    for index, part in enumerate(parts.values()):
        if part.group is not None and dist.get_world_size(part.group) > 1:
            across.setdefault(part.group, []).append(index)
    for group, indices in across.items():
        # Sums of signed 64-bit numbers wrap, which is the sum modulo 2^64.
        signed = [found[index] - 2**64 if found[index] >> 63 else found[index] for index in indices]
        together = torch.tensor(signed, dtype=torch.int64, device=device)
        dist.all_reduce(together, group=group)
        for index, value in zip(indices, together.tolist(), strict=True):
            found[index] = value & MASK
    return dict(zip(parts, found, strict=True))


def hexadecimal(value: int) -> str:
    """As it stands in the manifest: 16 digits."""
    return f"{value & MASK:016x}"


def _edge(values: Tensor, begin: int) -> int:
    """Bytes that do not fill a word of their own."""
    total = 0
    for at, byte in enumerate(values.tolist(), begin):
        word, place = divmod(at, _WORD)
        total += (byte << (8 * place)) * (2 * word + 1)
    return total


def _sum(words: Tensor, first: int) -> int:
    """Of whole words, in blocks: weights within a block are the same each time, what precedes it is a factor of its plain sum."""
    weights_of_block, room = _memory.on(words.device)
    plain, weighted = [], []
    for block in torch.split(words, _BLOCK):
        plain.append(block.sum())
        weighted.append(torch.mul(block, weights_of_block[: len(block)], out=room[: len(block)]).sum())
    sums, weights = torch.stack(plain).tolist(), torch.stack(weighted).tolist()
    total: int = sum(weights) + sum(2 * (first + at * _BLOCK) * each for at, each in enumerate(sums))
    return total
