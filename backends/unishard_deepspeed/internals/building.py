"""What has to be put right while a DeepSpeed 0.19.8 engine is built, and when it goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = [
    "accumulate_in_fp32",
    "allow_fp16",
    "forget",
    "forget_groups",
    "keeping_groups",
    "partition",
    "undo_first_step",
    "without_own_clipping",
]


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


def accumulate_in_fp32(optimizer: Any) -> None:
    """Stage 0 with masters adds up, reduces and measures a parameter's own gradient (runtime/fp16/unfused_optimizer.py).

    DeepSpeed refuses another format for it than the parameter's (runtime/engine.py, _do_optimizer_sanity_check); torch itself
    can let a bf16 or fp16 parameter have an fp32 gradient, and the optimizer takes whatever it finds.
    """
    for group in getattr(optimizer, "fp16_groups", []) if hasattr(optimizer, "fp32_groups") else []:
        for parameter in group:
            parameter.grad_dtype = torch.float32


def undo_first_step(optimizer: Any) -> None:
    """Stage 0 with masters steps once when it is built (runtime/fp16/unfused_optimizer.py, initialize_optimizer_states).

    Clearing the state undoes Adam's step count and moments; `set_masters` undoes the weight decay.
    """
    if hasattr(optimizer, "fp32_groups"):
        optimizer.state.clear()


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


def without_own_clipping(engine: Any) -> None:
    """Stage 0 clips by a norm that is discarded (runtime/engine.py, _take_model_step) or rounded; switch that off."""
    engine._config.gradient_clipping = 0.0
    if hasattr(engine.optimizer, "clip_grad"):  # runtime/fp16/unfused_optimizer.py
        engine.optimizer.clip_grad = 0.0


def partition(init: Any, parameter: nn.Parameter) -> None:
    """Leave this rank its part of a parameter that is whole and the same on all ranks (runtime/zero/partition_parameters.py).

    Args:
        init: A `deepspeed.zero.Init` that is not entered.
        parameter: On the device.
    """
    init._convert_to_deepspeed_param(parameter)
    parameter.partition()  # type: ignore[attr-defined]
    part, rank = parameter.ds_tensor, parameter.ds_zero_partition_rank  # type: ignore[attr-defined]
    part[max(0, parameter.ds_numel - part.numel() * rank) :].zero_()  # type: ignore[attr-defined]  # padding; DeepSpeed leaves what was there


def forget(engine: Any) -> None:
    """Remove what `engine.destroy()` leaves behind, so that the engine's memory can go while the model stays."""
    from deepspeed.runtime.zero import parameter_offload

    engine.module_forward_pre_hook.remove()  # runtime/engine.py
    engine.module_forward_post_hook.remove()
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [module for module in stack if module is not engine.module]
    for parameter in engine.module.parameters():
        if hasattr(parameter, "_z3_optimizer"):  # runtime/zero/stage3.py, _link_all_hp_params
            del parameter._z3_optimizer
