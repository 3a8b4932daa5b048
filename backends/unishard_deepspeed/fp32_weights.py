"""Set the master weights from the fp32 model; DeepSpeed makes them from parameters already rounded to the compute
dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.hooks import RemovableHandle

from unishard.engine.model.dtypes import is_kept
from unishard.errors import ConfigError, Problem
from unishard_deepspeed import fields
from unishard_deepspeed.flat_master_weights import InnerOptimizer
from unishard_deepspeed.private.optimizer_kind import require
from unishard_deepspeed.spec import ZeroSpec


@torch.no_grad()
def restore_fp32_weights(
    spec: ZeroSpec, inner: InnerOptimizer, originals: Iterable[tuple[nn.Parameter, Tensor]]
) -> list[RemovableHandle]:
    """Copy fp32 weights into the master weights after `deepspeed.initialize`, and undo what stage 0 has done.

    Stage 0 with master weights steps once when it is built (DeepSpeed 0.19.8, runtime/fp16/unfused_optimizer.py,
    initialize_optimizer_states): clearing the state undoes Adam's step count and moments, copying the weights undoes
    weight decay. It accumulates, reduces and takes the norm of `parameter.grad`, for which DeepSpeed has no setting but
    the parameter's dtype (runtime/engine.py, _do_optimizer_sanity_check); torch allows an fp32 gradient of a bf16 or
    fp16 parameter (`grad_dtype`), and DeepSpeed's optimizer uses it.

    Args:
        spec: What was built.
        inner: The torch optimizer.
        originals: The fp32 weights of each parameter: at stage 3 this rank's shard, otherwise the full tensor.

    Returns:
        Hooks to remove with the engine.
    """
    stage_0_masters = spec.kind == "stage-0" and spec.precision.compute != spec.precision.master
    if stage_0_masters:
        inner.optimizer.state.clear()
    for parameter, value in originals:
        _set_master(parameter, value, inner.full_masters.get(parameter) if stage_0_masters else None)
    if not stage_0_masters or spec.precision.accumulate != "fp32":
        return []
    return [_accumulate_in_fp32(parameter) for parameter in inner.trained]


def _accumulate_in_fp32(parameter: nn.Parameter) -> RemovableHandle:
    """Cast a window's first gradient, to which later ones are added in place.

    `grad_dtype = fp32` would also cast the gradient of each use of a weight before autograd adds them; plain torch and
    the other stages add them in the compute dtype.
    """
    parameter.grad_dtype = None  # any

    def cast(parameter: Tensor) -> None:
        if parameter.grad is not None and parameter.grad.dtype != torch.float32:
            parameter.grad = parameter.grad.float()

    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(cast)  # type: ignore[no-untyped-call]
    return handle


def _set_master(parameter: Any, value: Tensor, master: Tensor | None) -> None:
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

    if master is not None:
        master.copy_(value)
    elif not hasattr(parameter, "ds_tensor"):
        safe_set_full_fp32_param(parameter, value)
    elif (
        parameter.ds_tensor.numel()
    ):  # `safe_set_full_fp32_param` fails if a parameter's size is not divisible by the ranks
        safe_set_local_fp32_param(parameter, pad(value, (0, parameter.ds_tensor.numel() - value.numel())))


# -- Parameters that stay in fp32 in a 16-bit run (`precision.keep_fp32`) --------------------------
# DeepSpeed casts every parameter when it takes the model, and has no setting for that:
# `data_types.keep_in_fp32_modules` is about buffers (DeepSpeed 0.19.8, runtime/keep_in_fp32.py). Afterwards it works in
# the dtype that it finds: stages 1 and 2 by optimizer group, stage 3 by parameter, stage 0 by gradient.


def check(model: nn.Module, spec: ZeroSpec) -> None:
    """Check that DeepSpeed can keep what is marked; `rules` refuses patterns with offload earlier.

    Raises:
        BackendError: A private name is missing.
        ConfigError: What the model's class names is offloaded, and would be rounded.
    """
    if any(is_kept(each) and each.requires_grad for each in model.parameters()):
        require("kept-parameters", spec.kind)
    stage_3 = spec.kind == "stage-3"
    name = next(
        (name for name, each in model.named_parameters() if is_kept(each) and (stage_3 or each.requires_grad)), None
    )
    place = "params" if spec.zero["offload_param"] else "optimizer" if spec.offloads_optimizer and not stage_3 else None
    if name is not None and place is not None:
        raise ConfigError(
            [Problem("precision.keep_fp32", f"keeps {name}, and {fields.KEPT_OFFLOADED.format(place=place)}")]
        )


def after_cast(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]:
    """The optimizer for `deepspeed.initialize`, which gives kept parameters their fp32 data back first.

    A function is called between the cast and the construction of ZeRO's optimizer (runtime/engine.py,
    _configure_optimizer).

    Args:
        model: Kept parameters have their fp32 data. At stage 3 they are partitioned, and not cast.
        optimizer: The torch optimizer.
    """
    data = [
        (parameter, parameter.data)
        for parameter in model.parameters()
        if is_kept(parameter) and not hasattr(parameter, "ds_id")
    ]

    def restored(parameters: Any) -> torch.optim.Optimizer:
        for parameter, original in data:
            parameter.data = original
        data.clear()  # DeepSpeed keeps this function, and at stages 1 and 2 copies the data
        return optimizer

    return restored if data else optimizer
