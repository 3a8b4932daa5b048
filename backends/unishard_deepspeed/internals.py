"""The private names of DeepSpeed 0.19.8 that unishard relies on, all of them, with the file that defines each.

Everything else in this package goes through DeepSpeed's documented interface.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unishard_deepspeed.masters import Piece

__all__ = [
    "accumulate_in_fp32",
    "allow_fp16",
    "average_between_groups",
    "clear_stale_gradients",
    "divide_gradients",
    "forget",
    "forget_groups",
    "keeping_groups",
    "link_states_again",
    "making_every_update",
    "master_tensors",
    "parameter_bytes",
    "partition",
    "pieces_of_masters",
    "reduce_units_by_parameter",
    "set_masters",
    "torch_optimizer",
    "trained",
    "undo_first_step",
    "units",
    "without_own_clipping",
]

_MASTERS = (
    "fp32_partitioned_groups_flat",  # runtime/zero/stage3.py
    "single_partition_of_fp32_groups",  # runtime/zero/stage_1_and_2.py
    "fp32_groups_flat_partition",  # runtime/bf16_optimizer.py
)


def master_tensors(optimizer: Any) -> list[Tensor]:
    """The live fp32 masters on this rank: flat partitions, or whole tensors at stage 0."""
    for name in _MASTERS:
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    groups = getattr(optimizer, "fp32_groups", None)  # runtime/fp16/unfused_optimizer.py
    if groups is None:
        groups = [group["params"] for group in optimizer.param_groups]
    return [tensor for group in groups for tensor in group]


@torch.no_grad()
def set_masters(optimizer: Any, originals: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
    """Copy fp32 weights into the masters. Every rank needs all of them: whole ones, at stage 3 its own parts.

    DeepSpeed's own `safe_set_full_fp32_param` fails at stage 3 where the ranks do not divide a parameter.
    """
    replicated = _replicated_masters(optimizer)
    for parameter, value in originals:
        if parameter in replicated:
            replicated[parameter].copy_(value)
        elif hasattr(parameter, "ds_id"):
            part, _ = optimizer._get_fp32_opt_state_partition(parameter, release_swap_buffers=False)  # runtime/zero/stage3.py
            part.data[: value.numel()].copy_(value)
        else:
            parameter.set_full_hp_param(value)  # type: ignore[attr-defined]  # utils/tensor_fragment.py


def _replicated_masters(optimizer: Any) -> dict[Tensor, Tensor]:
    """Stage 0 with masters: each parameter's whole one (runtime/fp16/unfused_optimizer.py)."""
    if not hasattr(optimizer, "fp32_groups"):
        return {}
    pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
    return {lp: hp for lps, hps in pairs for lp, hp in zip(lps, hps, strict=True)}


def torch_optimizer(optimizer: Any) -> Any:
    """The user's torch optimizer inside DeepSpeed's; at stage 0 in fp32 there is no other."""
    return getattr(optimizer, "optimizer", optimizer)


def trained(optimizer: Any) -> list[nn.Parameter]:
    """The module's parameters that DeepSpeed updates, in the same order on every rank."""
    for name in ("fp16_groups", "bit16_groups", "bf16_groups"):  # stage3.py and unfused_optimizer.py, stage_1_and_2.py, bf16_optimizer.py
        if hasattr(optimizer, name):
            return [parameter for group in getattr(optimizer, name) for parameter in group]
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def pieces_of_masters(optimizer: Any) -> dict[Tensor, list[Piece]]:
    """Of each master on this rank, where the parameters lie in it."""
    pieces: dict[Tensor, list[Piece]] = {}
    replicated = _replicated_masters(optimizer)
    for parameter in trained(optimizer):
        if hasattr(parameter, "ds_id"):
            group, start, numel = optimizer.grad_position[optimizer.get_param_id(parameter)]  # runtime/zero/stage3.py
            master = optimizer.fp32_partitioned_groups_flat[group]
        elif hasattr(parameter, "_hp_mapping"):  # utils/tensor_fragment.py
            mapping = parameter._hp_mapping
            if mapping is None:
                continue  # it lies in other ranks' parts
            start, numel = mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel
            master = master_tensors(optimizer)[mapping.param_group_index]
        else:
            master = replicated.get(parameter, parameter)
            start, numel = 0, parameter.numel()
        if numel:
            pieces.setdefault(master, []).append(Piece(parameter, start, numel))
    return pieces


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


def reduce_units_by_parameter(optimizer: Any) -> None:
    """Stage 3: reduce a leaf module's gradients as they come. Collective.

    DeepSpeed waits for a full backward hook of the leaf module, which torch fires before the module's own gradients exist
    when none of its positional inputs needs a gradient (an embedding, the first layer, inputs passed by keyword), and which
    then puts zeros in their place (runtime/zero/stage3.py, create_reduce_and_remove_grad_hooks). The parameters are still
    gathered together: that depends on the module's flag alone.
    """
    in_leaves = [
        parameter for group in getattr(optimizer, "fp16_groups", []) for parameter in group if hasattr(parameter, "ds_z3_leaf_module")
    ]
    if not in_leaves:
        return
    for hook in (*optimizer._grad_acc_hooks, *optimizer._leaf_module_hooks):
        hook.remove()
    optimizer._grad_acc_hooks.clear()
    optimizer._leaf_module_hooks.clear()
    for parameter in in_leaves:
        del parameter.ds_z3_leaf_module
    optimizer.create_reduce_and_remove_grad_hooks()


def clear_stale_gradients(optimizer: Any) -> None:
    """Stage 3 keeps the gradient of a parameter that later steps do not use, and applies it again (runtime/zero/stage3.py)."""
    buffer = getattr(optimizer, "grad_partitions_flat_buffer", None)
    if buffer is not None:
        buffer.zero_()


def average_between_groups(optimizer: Any, group: Any) -> None:
    """Average the gradients of a window over a process group before they are clipped and applied. Collective, in each window.

    Args:
        optimizer: Of stage 2 or 3.
        group: The ranks that hold the same part of different copies.
    """
    finalize = optimizer.finalize_gradient_accumulation_boundary  # what engine.step() calls first (runtime/engine.py)

    def finalize_averaged() -> None:
        if hasattr(optimizer, "grad_partitions_flat_buffer"):
            _average_parts(optimizer, group)
            finalize()
        else:
            finalize()
            _average_flat(optimizer, group)

    optimizer.finalize_gradient_accumulation_boundary = finalize_averaged


def _average_parts(optimizer: Any, group: Any) -> None:
    """Stage 3 (runtime/zero/stage3.py)."""
    dist.all_reduce(optimizer.grad_partitions_flat_buffer, dist.ReduceOp.AVG, group)
    if optimizer.offload_optimizer:
        # Only these are moved to the host; another group may have used parameters that this one has not.
        parts = [parameter for parameters in optimizer.fp16_groups for parameter in parameters if parameter.requires_grad]
        optimizer._offload_boundary_param_ids.update(
            part.ds_id for part in parts if part.partition_numel() * optimizer._get_param_partition_rank(part) < part.ds_numel
        )


def _average_flat(optimizer: Any, group: Any) -> None:
    """Stage 2 (runtime/zero/stage_1_and_2.py)."""
    if not optimizer.cpu_offload:
        for gradients in optimizer.averaged_gradients.values():
            flat = getattr(gradients, "flat_partition", None)
            if flat is not None:
                dist.all_reduce(flat, dist.ReduceOp.AVG, group)
                continue
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat, dist.ReduceOp.AVG, group)
            for gradient, piece in zip(gradients, torch.split(flat, [gradient.numel() for gradient in gradients]), strict=True):
                gradient.copy_(piece.view_as(gradient))
        return
    for master, parameters in zip(optimizer.single_partition_of_fp32_groups, optimizer.params_in_partition, strict=True):
        dist.all_reduce(master.grad, dist.ReduceOp.AVG, group)
        for parameter in parameters:
            number = optimizer.get_param_id(parameter)
            _, _, start, numel = optimizer.grad_position[number]
            optimizer.norm_for_param_grads[number] = master.grad.narrow(0, int(start), int(numel)).double().norm()


def forget_groups() -> None:
    """Let the engines that are built next have all ranks again: `initialize` keeps its `mpu` for the whole process (utils/groups.py)."""
    from deepspeed.utils import groups

    groups.mpu = None


def divide_gradients(optimizer: Any, divisor: float) -> None:
    """Divide the gradients of ZeRO's next update, before their norm is taken; 1 switches that off again."""
    if hasattr(optimizer, "loss_scale"):
        optimizer.loss_scale = divisor  # divides in the update, as fp16 does; nothing multiplies the loss
    elif divisor != 1:
        torch._foreach_div_(optimizer.fp32_groups_gradients_flat, divisor)  # runtime/bf16_optimizer.py


@contextmanager
def making_every_update(optimizer: Any) -> Iterator[list[bool]]:
    """Have ZeRO's optimizer make an update with gradients that are not finite, as plain torch does, instead of leaving it out.

    All of them ask `is_invalid_grad_norm` of their own module (runtime/utils.py), stages 1 and 2 `check_overflow` before it.

    Yields:
        The answers that they would have got, as they ask; some take a norm of 1 or -1 for one that is not finite.
    """
    answers: list[bool] = []

    def asked_in_vain(norm: Any) -> bool:
        answers.append(asked(norm))
        return False

    module, checks = sys.modules[type(optimizer).__module__], hasattr(optimizer, "check_overflow")
    asked = module.is_invalid_grad_norm
    module.is_invalid_grad_norm = asked_in_vain  # type: ignore[attr-defined]
    if checks:
        optimizer.check_overflow = lambda partition_gradients=True: None
    try:
        yield answers
    finally:
        module.is_invalid_grad_norm = asked  # type: ignore[attr-defined]
        if checks:
            del optimizer.check_overflow


def link_states_again(optimizer: Any) -> None:
    """DeepSpeed looks for the optimizer's state after its first update alone; let it look after the next one too.

    (_lazy_init_hp_params_optimizer_state in runtime/zero/stage3.py, stage_1_and_2.py and bf16_optimizer.py)
    """
    if hasattr(optimizer, "_hp_optimizer_states_linked"):
        optimizer._hp_optimizer_states_linked = False


def without_own_clipping(engine: Any) -> None:
    """Stage 0 clips by a norm that is discarded (runtime/engine.py, _take_model_step) or rounded; switch that off."""
    engine._config.gradient_clipping = 0.0
    if hasattr(engine.optimizer, "clip_grad"):  # runtime/fp16/unfused_optimizer.py
        engine.optimizer.clip_grad = 0.0


def units(engine: Any) -> tuple[str, ...]:
    """Names of the modules whose parameters stage 3 gathers together; no other stage reads the flag (utils/z3_leaf_module.py)."""
    if engine.zero_optimization_stage() != 3:
        return ()
    return tuple(name for name, module in engine.module.named_modules() if getattr(module, "_z3_leaf", False))


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


def parameter_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of parameters on this rank: what is gathered, and this rank's own part (runtime/zero/partition_parameters.py)."""
    return sum(tensor.numel() * tensor.element_size() for parameter in parameters for tensor in _held(parameter))


def _held(parameter: nn.Parameter) -> Iterator[Tensor]:
    yield parameter.data
    if hasattr(parameter, "ds_tensor"):
        yield parameter.ds_tensor


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
