"""Settings of FSDP2 about its collectives, which not every torch and device has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from unishard.errors import BackendError
from unishard_fsdp.options import COLLECTIVE_SETTINGS, FullyShard

_ON_CUDA = {
    "allocate_memory_from_process_group_for_comm": "elsewhere no process group allocates tensors",
    "symm_mem_for_comm": "only NCCL has symmetric memory",
}


def require(native: Mapping[str, Any]) -> None:
    """Check that this torch has the settings that are on.

    Raises:
        BackendError: It lacks one.
    """
    for key in COLLECTIVE_SETTINGS:
        if native.get(key) and not hasattr(FSDPModule, f"set_{key}"):
            raise BackendError(
                f"native.fsdp.{key} needs FSDPModule.set_{key}, which torch {torch.__version__} does not have; remove "
                "it, or install torch 2.13 or newer"
            )


def require_device(native: Mapping[str, Any], device: torch.device) -> None:
    """Check that the device has the settings that are on.

    Raises:
        BackendError: It lacks one.
    """
    for key, why in _ON_CUDA.items():
        if native.get(key) and device.type != "cuda":
            raise BackendError(
                f"native.fsdp.{key} needs CUDA devices, and this run computes on {device.type}: {why}; remove it"
            )


def apply(model: nn.Module, options: FullyShard) -> None:
    """Set what is on, after `fully_shard` was called on every unit. Collective."""
    if options.separate_reduce_scatter_group:  # first: the others allocate for the group
        cast(FSDPModule, model).set_separate_reduce_scatter_group(True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            if options.allocate_memory_from_process_group_for_comm:
                module.set_allocate_memory_from_process_group_for_comm(True)
            if options.symm_mem_for_comm:
                module.set_symm_mem_for_comm()
