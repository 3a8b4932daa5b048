"""Set the master weights from the fp32 model; DeepSpeed makes them from parameters already rounded to the compute
dtype.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.hooks import RemovableHandle

from unishard_deepspeed.inner_optimizer import InnerOptimizer
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
