"""The arguments of Lightning's `DDPStrategy` and `ModelParallelStrategy` (2.6.6), one row each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.contract.entries import DocumentValues, Key, KeyEffect, left_out
from unishard.contract.key_rows import broadcast_buffers, integer, number, refuses
from unishard.contract.rules import Fit
from unishard.formats.lightning.keys import left, off, optional

__all__ = ["DDP", "MODEL_PARALLEL"]

_LAUNCH = "the launcher decides it"
_BYTES = 4
_CHECKS = ("device_ids", "output_device", "dim", "check_reduction", "init_sync")
_TIME = "affects only time and memory"
_HOOK = "hooks are not supported; use a smaller dtype to reduce gradients in, and remove it"


def _bucket(value: Any, given: DocumentValues) -> KeyEffect:
    elements = int(number(0)(value) * 2**20) // _BYTES
    return KeyEffect(fields={"communication.reduce_bucket_size": max(elements, 1)})


DDP: Mapping[str, Key] = {
    **dict.fromkeys(
        ("accelerator", "parallel_devices", "cluster_environment", "process_group_backend", "timeout", "start_method"),
        left(_LAUNCH),
    ),
    **dict.fromkeys(_CHECKS, left("one device a rank, and what ranks check at the start")),
    "checkpoint_io": left("affects only files"),
    **dict.fromkeys(
        ("precision_plugin", "precision"),
        refuses("a plugin cannot be read from a file; write precision beside the strategy", off),
    ),
    "find_unused_parameters": left("parameters that no rank uses are no problem here, and need no search"),
    **dict.fromkeys(
        (
            "static_graph",
            "gradient_as_bucket_view",
            "bucket_cap_mb_list",
            "batched_grad_copy",
            "skip_all_reduce_unused_params",
        ),
        left(_TIME),
    ),
    **dict.fromkeys(
        ("broadcast_buffers", "forward_sync_buffers"), optional(broadcast_buffers, "training.buffers", Fit.EQUIVALENT)
    ),
    "bucket_cap_mb": optional(_bucket, "communication.reduce_bucket_size"),
    **dict.fromkeys(("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper"), refuses(_HOOK, off)),
    "model_averaging_period": refuses("averaging weights instead of gradients is no engine's here; remove it", off),
    "mixed_precision": refuses(
        "DDP's own mixed precision is not what Lightning's precision says; write precision", off
    ),
    "delay_all_reduce_named_params": refuses("every gradient is reduced here; remove it", off),
    "param_to_hook_all_reduce": refuses("every gradient is reduced here; remove it", off),
    "process_group": refuses("groups are objects of the training script; remove it", off),
}
"""The arguments of `DDPStrategy`, and those that it hands on to DistributedDataParallel."""

_WRITTEN = "configure_model calls fully_shard there; here every block is a unit"
_TENSOR = "tensor parallelism is not supported; write tensor_parallel_size: 1"


def _tensor(value: Any, given: DocumentValues) -> KeyEffect:
    if value in ("auto", None) and given.topology is not None and given.topology.local_world_size == 1:
        return left_out("one device a node, so nothing is cut")
    if value in ("auto", None) or integer(1)(value) > 1:
        return KeyEffect(Fit.UNSUPPORTED, _TENSOR)
    return left_out("nothing is cut")


def _data(value: Any, given: DocumentValues) -> KeyEffect:
    if value not in ("auto", None):
        integer(1)(value)
    return KeyEffect(Fit.APPROXIMATE, _WRITTEN, {"sharding.strategy": "full_shard"})


MODEL_PARALLEL: Mapping[str, Key] = {
    "data_parallel_size": Key(_data, "sharding.strategy", Fit.APPROXIMATE, _WRITTEN, tool_default="auto"),
    "tensor_parallel_size": Key(_tensor, "", Fit.UNSUPPORTED, _TENSOR, tool_default="auto"),
    "save_distributed_checkpoint": left("affects only the files of checkpoints"),
    "parallelize_fn": left(_WRITTEN),
    **dict.fromkeys(("process_group_backend", "timeout"), left(_LAUNCH)),
}
"""The arguments of `ModelParallelStrategy`, Lightning's FSDP2. Fabric's keeps the optimizer on the old parameters where
model and optimizer are set up together, so that a step moves nothing, and leaves gradients unreduced after
`no_backward_sync(enabled=False)` (2.6.6)."""
