"""A hash of a tensor that does not depend on how it is sharded: the same on every engine and any number of ranks.

The tensor's bytes, flattened and padded with zeros, are read as little-endian words of 64 bits; the hash is the sum of
`word[k] * (2 k + 1)` modulo 2^64. Because it is a sum, each shard contributes its own term, however the bytes are
divided. Every weight is odd, so a change of any single word changes the hash, and so does swapping two words that
differ in a bit below the top one. It detects misplaced and damaged data; it does not protect against an attacker.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from unishard.distributed.boxes import inside, span
from unishard.distributed.shards import Shard, flat
from unishard.distributed.slice_order import MEMORY_ORDER, SliceOrder

MASK = 2**64 - 1
_WORD = 8
_BLOCK = 1 << 17
"""Words multiplied at once: 1 MiB, which fits into the CPU cache."""


class _Memory(threading.local):
    """Buffers of one thread, by device.

    Allocating them for every block would cost the host more than the arithmetic.
    """

    def __init__(self) -> None:
        self.of: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The weights of a block, and a buffer for its products."""
        if device not in self.of:
            with torch.inference_mode(False):  # else it could not be written to outside inference mode
                weights = torch.arange(1, 2 * _BLOCK, 2, dtype=torch.int64, device=device)
                self.of[device] = weights, torch.empty_like(weights)
        return self.of[device]


_memory = _Memory()


def hash_of(values: Tensor, start: int = 0) -> int:
    """What a shard adds to the hash of its tensor, modulo 2^64.

    Args:
        values: A shard, or a full tensor of any layout; of any dtype on any device.
        start: Its first element in the flattened tensor.
    """
    bytes_ = flat(values).view(torch.uint8)
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


def hash_of_shard(values: Tensor, start: int, shape: Sequence[int], order: SliceOrder = MEMORY_ORDER) -> int:
    """What a shard of any order adds to the hash of its tensor, modulo 2^64.

    Args:
        values: Elements in a row, of any dtype on any device.
        start: The first of them.
        shape: Of the full tensor.
        order: How the elements are counted.
    """
    if order == MEMORY_ORDER:
        return hash_of(values, start)
    total, row = 0, flat(values)
    for held in order.boxes(shape, start, start + row.numel()):
        around = order.around(shape, held.box)
        rows = row.new_zeros(math.prod(around[1]))  # zeros add nothing
        inside(rows, around, held.box).copy_(row[held.first - start : held.last - start].view(held.sizes))
        total += hash_of(rows, span(shape, around)[0])
    return total & MASK


def hashes(parts: Mapping[str, Shard], device: torch.device) -> dict[str, int]:
    """Hashes of full tensors, from the ranks' shards: one all-reduce per process group. Collective.

    Args:
        parts: The same names in the same order on all ranks of a group.
        device: Where this rank computes.
    """
    sums = [hash_of_shard(part.values, part.interval.start, part.shape, part.order) for part in parts.values()]
    across: dict[dist.ProcessGroup, list[int]] = {}
    for index, part in enumerate(parts.values()):
        if part.group is not None and dist.get_world_size(part.group) > 1:
            across.setdefault(part.group, []).append(index)
    for group, indices in across.items():
        # Sums of signed 64-bit numbers wrap, which is the sum modulo 2^64.
        signed = [sums[index] - 2**64 if sums[index] >> 63 else sums[index] for index in indices]
        together = torch.tensor(signed, dtype=torch.int64, device=device)
        dist.all_reduce(together, group=group)
        for index, value in zip(indices, together.tolist(), strict=True):
            sums[index] = value & MASK
    return dict(zip(parts, sums, strict=True))


def hexadecimal(value: int) -> str:
    """As written in the manifest: 16 digits."""
    return f"{value & MASK:016x}"


def _edge(values: Tensor, begin: int) -> int:
    """The sum over bytes that do not fill a word."""
    total = 0
    for at, byte in enumerate(values.tolist(), begin):
        word, place = divmod(at, _WORD)
        total += (byte << (8 * place)) * (2 * word + 1)
    return total


def _sum(words: Tensor, first: int) -> int:
    """The sum over full words, block by block: the weights within a block never change, and the block's offset scales
    its plain sum.
    """
    weights_of_block, room = _memory.on(words.device)
    plain, weighted = [], []
    for block in torch.split(words, _BLOCK):
        plain.append(block.sum())
        weighted.append(torch.mul(block, weights_of_block[: len(block)], out=room[: len(block)]).sum())
    sums, weights = torch.stack(plain).tolist(), torch.stack(weighted).tolist()
    total: int = sum(weights) + sum(2 * (first + at * _BLOCK) * value for at, value in enumerate(sums))
    return total
