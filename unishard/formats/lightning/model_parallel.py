"""The arguments of Lightning's `ModelParallelStrategy` (2.6.6), one row each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from unishard.contract.entries import DocumentValues, Entry, Key, KeyEffect, left_out
from unishard.contract.key_rows import integer
from unishard.contract.rules import Fit
from unishard.formats.lightning.rows import TIMEOUT, left
from unishard.formats.lightning.strategy import Strategy

_WRITTEN = "configure_model calls fully_shard there; here every block is a unit"
_TENSOR = "tensor parallelism is not supported; write tensor_parallel_size: 1"


def _tensor(value: Any, document: DocumentValues) -> KeyEffect:
    if value in ("auto", None) and document.topology is not None and document.topology.local_world_size == 1:
        return left_out("one device a node, so nothing is cut")
    if value in ("auto", None) or integer(1)(value) > 1:
        return KeyEffect(Fit.UNSUPPORTED, _TENSOR)
    return left_out("nothing is cut")


def _data(value: Any, document: DocumentValues) -> KeyEffect:
    if value not in ("auto", None):
        integer(1)(value)
    return KeyEffect(Fit.APPROXIMATE, _WRITTEN, {"sharding.strategy": "full_shard"})


ARGUMENTS: Mapping[str, Key] = {
    "data_parallel_size": Key(_data, ("sharding.strategy",), Fit.APPROXIMATE, _WRITTEN, tool_default="auto"),
    "tensor_parallel_size": Key(_tensor, (), Fit.UNSUPPORTED, _TENSOR, tool_default="auto"),
    "save_distributed_checkpoint": left("affects only the files of checkpoints"),
    "parallelize_fn": left(_WRITTEN),
    "process_group_backend": left("the launcher decides it"),
    "timeout": TIMEOUT,
}
"""The arguments of `ModelParallelStrategy`, Lightning's FSDP2. Fabric's keeps the optimizer on the old parameters where
model and optimizer are set up together, so that a step moves nothing, and leaves gradients unreduced after
`no_backward_sync(enabled=False)` (2.6.6)."""


def entries_of(strategy: Strategy) -> Iterator[Entry]:
    """What the strategy and its arguments say."""
    yield strategy.says({"backend": "fsdp"})
    yield from strategy.table(ARGUMENTS)
