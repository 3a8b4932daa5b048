"""What has to be put right while a DeepSpeed engine is built, and when it goes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from unishard_deepspeed.patches import PATCHES

__all__ = ["allow_fp16", "compile_nothing", "forget", "forget_groups", "keeping_groups", "leave_process_group", "swapper_of"]


def allow_fp16() -> None:
    """Let DeepSpeed train in fp16 on a CPU.

    It asks whether oneDNN has fp16 kernels for this processor (accelerator/cpu_accelerator.py, is_fp16_supported), both before it
    builds an engine and before it reduces fp16 gradients; torch computes in fp16 on every processor. Other accelerators answer
    for their own hardware.
    """
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        accelerator.is_fp16_supported = lambda: True


def compile_nothing() -> None:
    """Keep DeepSpeed from compiling shm_comm for half a minute at first use; only inference calls it (comm/torch.py, build_shm_op).

    Elsewhere than on the CPU it does not exist, and asking for this table would try every op with the compilers of the machine.
    Where the name is gone, it is compiled.
    """
    if PATCHES["no-compiler"].works:
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def leave_process_group() -> None:
    """Forget the clones that DeepSpeed keeps of a process group that is gone (comm/comm.py and utils/groups.py)."""
    PATCHES["second-process-group"].require()
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    groups._release_process_group_references()
    comm.cdb = None


@contextmanager
def keeping_groups(client: Any) -> Iterator[None]:
    """Keep ZeRO from replacing an Adagrad, while it is built, by one with a single group and the default rate for all.

    It does so since Adagrad has state from its construction on (runtime/zero/stage_1_and_2.py and stage3.py,
    initialize_optimizer_states), and what it links afterwards belongs to the first group alone (_link_all_hp_params).
    The state is cleared instead; Adagrad makes it anew in the first step (torch 2.13, optim/adagrad.py, _init_group).
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


def forget_groups() -> None:
    """Let the engines that are built next have all ranks again: `initialize` keeps its `mpu` for the whole process (utils/groups.py)."""
    from deepspeed.utils import groups

    groups.mpu = None


def swapper_of(init: Any) -> Any:
    """What reads and writes parameters in files, which several `deepspeed.zero.Init` of one model share."""
    return init.param_swapper


def forget(engine: Any) -> None:
    """Remove what `engine.destroy()` leaves behind, so that the engine's memory can go while the model stays."""
    patch = PATCHES["closed-engines"]
    if not patch.works:
        warnings.warn(f"{patch.refusal()}; its hooks and its memory stay", stacklevel=2)
        return
    from deepspeed.runtime.zero import parameter_offload

    engine.module_forward_pre_hook.remove()  # runtime/engine.py
    engine.module_forward_post_hook.remove()
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [module for module in stack if module is not engine.module]
    for parameter in engine.module.parameters():
        if hasattr(parameter, "_z3_optimizer"):  # runtime/zero/stage3.py, _link_all_hp_params
            del parameter._z3_optimizer
