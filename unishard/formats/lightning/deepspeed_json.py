"""The JSON that Lightning's `DeepSpeedStrategy` (2.6.6, `_create_default_config`) makes of its arguments, leaf by
leaf.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from unishard.contract.entries import Key
from unishard.formats.lightning.rows import TIMEOUT, left
from unishard.formats.names import ignored, names

ARGUMENTS: Mapping[str, Any] = {
    "zero_optimization": True,
    "stage": 2,
    "offload_optimizer": False,
    "offload_parameters": False,
    "offload_params_device": "cpu",
    "nvme_path": "/local_nvme",
    "params_buffer_count": 5,
    "params_buffer_size": 100_000_000,
    "max_in_cpu": 1_000_000_000,
    "offload_optimizer_device": "cpu",
    "optimizer_buffer_count": 4,
    "block_size": 1048576,
    "queue_depth": 8,
    "single_submit": False,
    "overlap_events": True,
    "thread_count": 1,
    "pin_memory": False,
    "sub_group_size": 1_000_000_000_000,
    "contiguous_gradients": True,
    "overlap_comm": True,
    "allgather_partitions": True,
    "reduce_scatter": True,
    "allgather_bucket_size": 200_000_000,
    "reduce_bucket_size": 200_000_000,
    "zero_allow_untested_optimizer": True,
    "logging_batch_size_per_gpu": "auto",
    "partition_activations": False,
    "cpu_checkpointing": False,
    "contiguous_memory_optimization": False,
    "synchronize_checkpoint_boundary": False,
}
"""The arguments that the JSON is made of, and their defaults, several of which are not DeepSpeed's own."""

SCALING: Mapping[str, Any] = {
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
"""The arguments that become the `fp16` block under a 16-bit precision, and their defaults."""

_ZERO = names(
    "stage contiguous_gradients overlap_comm allgather_partitions reduce_scatter allgather_bucket_size "
    "reduce_bucket_size sub_group_size"
)
_SAID = ("stage", "overlap_comm", "allgather_bucket_size", "reduce_bucket_size", "sub_group_size")
"""Defaults that are not DeepSpeed's own, so that silence means something else."""


class Leaf(NamedTuple):
    """One key of the JSON."""

    key: str
    value: Any
    arguments: tuple[str, ...]
    """Those that decide it."""
    assumed: bool
    """Whether none of them is written, and the strategy's default stands."""


def leaves_of(written: Mapping[str, Any]) -> Iterator[Leaf]:
    """The JSON for these arguments. A default that is DeepSpeed's own as well, or that has no effect, is left out."""
    values = {**ARGUMENTS, **written}

    def leaf(key: str, value: Any, *names: str) -> Leaf:
        return Leaf(key, value, names, not any(name in written for name in names))

    def written_leaf(key: str, name: str, *, own: bool) -> Iterator[Leaf]:
        if own or name in written:
            yield leaf(key, values[name], name)

    if not _true(values["zero_optimization"]):
        yield leaf("zero_optimization.stage", 0, "zero_optimization")
    else:
        for name in _ZERO:
            yield from written_leaf(f"zero_optimization.{name}", name, own=name in _SAID)
        yield from written_leaf("zero_allow_untested_optimizer", "zero_allow_untested_optimizer", own=True)
        yield from _offloads(values, leaf)
    if "nvme" in _devices(values):
        for name in ("block_size", "queue_depth", "single_submit", "overlap_events", "thread_count"):
            yield from written_leaf(f"aio.{name}", name, own=False)
    for name in (
        "partition_activations",
        "cpu_checkpointing",
        "contiguous_memory_optimization",
        "synchronize_checkpoint_boundary",
    ):
        yield from written_leaf(f"activation_checkpointing.{name}", name, own=False)
    if values["logging_batch_size_per_gpu"] != "auto":
        yield leaf("train_micro_batch_size_per_gpu", values["logging_batch_size_per_gpu"], "logging_batch_size_per_gpu")


_DEVICES = {"offload_optimizer": "offload_optimizer_device", "offload_parameters": "offload_params_device"}
"""The argument that says where, by the switch of what is offloaded."""


def _offloads(values: Mapping[str, Any], leaf: Any) -> Iterator[Leaf]:
    optimizer = {"buffer_count": "optimizer_buffer_count"}
    yield from _offload(values, leaf, "offload_optimizer", "offload_optimizer", optimizer)
    parameters = {
        "buffer_count": "params_buffer_count",
        "buffer_size": "params_buffer_size",
        "max_in_cpu": "max_in_cpu",
    }
    yield from _offload(values, leaf, "offload_parameters", "offload_param", parameters)


def _offload(
    values: Mapping[str, Any], leaf: Any, switch: str, section: str, sizes: Mapping[str, str]
) -> Iterator[Leaf]:
    """One block of offload; `sizes` are its keys for files, and the arguments that say them."""
    if not _true(values[switch]):
        return
    argument, block = _DEVICES[switch], f"zero_optimization.{section}"
    yield leaf(f"{block}.device", values[argument], switch, argument)
    yield leaf(f"{block}.pin_memory", values["pin_memory"], "pin_memory")
    if values[argument] == "nvme":
        for key, name in {"nvme_path": "nvme_path", **sizes}.items():
            yield leaf(f"{block}.{key}", values[name], name)


def _devices(values: Mapping[str, Any]) -> set[Any]:
    return {values[device] for switch, device in _DEVICES.items() if _true(values[switch])}


def _true(value: Any) -> bool:
    return str(value).strip().lower() in ("true", "1", "yes", "on")


OWN: Mapping[str, Key] = {**ignored("lightning/ignored_deepspeed.txt", left), "timeout": TIMEOUT}
"""The arguments that concern only Lightning."""
