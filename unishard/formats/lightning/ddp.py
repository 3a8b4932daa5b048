"""The arguments of Lightning's `DDPStrategy` (2.6.6), one row each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from unishard.contract.entries import DocumentValues, Entry, Key, KeyEffect
from unishard.contract.key_rows import broadcast_buffers, number
from unishard.contract.rules import Fit
from unishard.formats.lightning.rows import TIMEOUT, left, off, optional
from unishard.formats.lightning.strategy import Strategy
from unishard.formats.names import each, ignored

_BYTES = 4


def _bucket(value: Any, document: DocumentValues) -> KeyEffect:
    elements = int(number(0)(value) * 2**20) // _BYTES
    return KeyEffect(fields={"communication.reduce_bucket_size": max(elements, 1)})


ARGUMENTS: Mapping[str, Key] = {
    **ignored("lightning/ignored_ddp.txt", left, off),
    **each(
        "broadcast_buffers forward_sync_buffers", optional(broadcast_buffers, ("training.buffers",), Fit.EQUIVALENT)
    ),
    "timeout": TIMEOUT,
    "bucket_cap_mb": optional(_bucket, ("communication.reduce_bucket_size",)),
}
"""The arguments of `DDPStrategy`, and those that it hands on to DistributedDataParallel."""


def entries_of(strategy: Strategy) -> Iterator[Entry]:
    """What the strategy and its arguments say."""
    yield strategy.says({"sharding.strategy": "no_shard", "backend": "fsdp"})
    yield from strategy.table(ARGUMENTS)
