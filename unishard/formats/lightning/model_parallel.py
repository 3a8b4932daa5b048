"""The arguments of Lightning's `ModelParallelStrategy` (2.6.6), one row each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from unishard.contract.entries import DocumentValues, Entry, Key, KeyEffect, Unreadable, left_out
from unishard.contract.key_rows import integer
from unishard.contract.rules import Fit
from unishard.formats.lightning.rows import TIMEOUT, left
from unishard.formats.lightning.strategy import Strategy

_WRITTEN = "configure_model calls fully_shard there; here every block is a unit"
_TENSOR = "configure_model cuts the layers there; here the plan of the model's class does"


def _tensor(value: Any, document: DocumentValues) -> KeyEffect:
    if value in ("auto", None) and document.topology is None:
        raise Unreadable(
            "must be a number here: auto is the number of devices of a node; write tensor_parallel_size: 2"
        )
    of_node = document.topology.local_world_size if document.topology else 1
    size = of_node if value in ("auto", None) else integer(1)(value)
    if size == 1:
        return left_out("nothing is cut")
    return KeyEffect(Fit.APPROXIMATE, _TENSOR, {"parallel.tensor.size": size})


def _data(value: Any, document: DocumentValues) -> KeyEffect:
    if value not in ("auto", None):
        integer(1)(value)
    return KeyEffect(Fit.APPROXIMATE, _WRITTEN, {"sharding.strategy": "full_shard"})


ARGUMENTS: Mapping[str, Key] = {
    "data_parallel_size": Key(_data, ("sharding.strategy",), Fit.APPROXIMATE, _WRITTEN, tool_default="auto"),
    "tensor_parallel_size": Key(_tensor, ("parallel.tensor.size",), Fit.APPROXIMATE, _TENSOR, tool_default="auto"),
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
