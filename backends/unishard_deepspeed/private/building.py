"""Workarounds applied when a DeepSpeed engine is created and closed."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from unishard_deepspeed.private import PRIVATE_API


def allow_fp16() -> None:
    """Let DeepSpeed train in fp16 on a CPU.

    DeepSpeed checks whether oneDNN has fp16 kernels for this CPU (accelerator/cpu_accelerator.py, is_fp16_supported)
    before it builds an engine and before it reduces fp16 gradients; torch computes in fp16 on every CPU. The check
    stays on other accelerators.
    """
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        accelerator.is_fp16_supported = lambda: True


def compile_nothing() -> None:
    """Prevent DeepSpeed from compiling shm_comm at first use, for half a minute; only inference needs it
    (comm/torch.py, build_shm_op).

    It exists only on the CPU. DeepSpeed looks it up in a table of all ops that nothing else reads. Filling the table
    tries each op with the machine's compilers, in every process (ops/__init__.py, _probe_compatible_ops). If the
    private name is missing, shm_comm is compiled.
    """
    if PRIVATE_API["no-compiler"].works:
        import deepspeed

        vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False


def leave_process_group() -> None:
    """Release DeepSpeed's references to a destroyed process group (comm/comm.py and utils/groups.py)."""
    PRIVATE_API["second-process-group"].require()
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    groups._release_process_group_references()
    comm.cdb = None


@contextmanager
def keep_adagrad(client: Any) -> Iterator[None]:
    """Prevent ZeRO from replacing an Adagrad by one with a single group and the default learning rate.

    ZeRO does so because Adagrad creates its state when it is constructed (runtime/zero/stage_1_and_2.py and stage3.py,
    initialize_optimizer_states), and then links only the first group (_link_all_hp_params).
    Here the state is cleared instead; Adagrad recreates it in the first step (torch 2.13, optim/adagrad.py,
    _init_group).
    """
    if not isinstance(client, torch.optim.Adagrad):
        yield
        return
    client.state.clear()
    kind = type(client)
    client.__class__ = torch.optim.Optimizer  # type: ignore[assignment]
    try:
        yield
    finally:
        client.__class__ = kind


def clear_mpu() -> None:
    """Clear the `mpu` that `initialize` keeps for the process, so that later engines use all ranks
    (utils/groups.py).
    """
    from deepspeed.utils import groups

    groups.mpu = None


def gather_empty(parameters: Iterable[Any]) -> None:
    """Gather empty parameters in a process group of one rank, without communication, as stage 3 does on one rank.

    Stage 3 skips modules whose shards have no elements, and then expects their parameters to be gathered
    (runtime/zero/partitioned_param_coordinator.py, _fetch_sub_module_impl); among several ranks it fails to put
    together a full tensor of no elements (runtime/zero/partition_parameters.py, AllGatherCoalescedHandle).
    """
    empty = list(parameters)
    if empty:
        PRIVATE_API["empty-parameters"].require()
        group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        for parameter in empty:
            parameter.ds_process_group = group
            parameter.partition_numel = lambda: 1


def forget(engine: Any) -> None:
    """Remove what `engine.destroy()` leaves, so that the engine's memory is freed while the model lives."""
    patch = PRIVATE_API["closed-engines"]
    if not patch.works:
        warnings.warn(f"{patch.refusal()}; its hooks and memory are not freed", stacklevel=2)
        return
    from deepspeed.runtime.zero import parameter_offload

    engine.module_forward_pre_hook.remove()  # runtime/engine.py
    engine.module_forward_post_hook.remove()
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [module for module in stack if module is not engine.module]
    for parameter in engine.module.parameters():
        if hasattr(parameter, "_z3_optimizer"):  # runtime/zero/stage3.py, _link_all_hp_params
            del parameter._z3_optimizer
    _forget_released()


def _forget_released() -> None:
    """Clear a cache of ZeRO-3 that keeps every model of the process (runtime/zero/partitioned_param_coordinator.py,
    __params_to_release).

    Its keys are a method's `self` and the model's modules. What other engines have in it, they compute again.
    """
    if not PRIVATE_API["freed-models"].works:
        return
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    method = PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
    inside = (
        inspect.getclosurevars(method).nonlocals.values() if inspect.isfunction(method) else ()
    )  # it is wrapped, for NVTX
    for function in (method, *inside):
        if hasattr(function, "cache_clear"):
            function.cache_clear()
