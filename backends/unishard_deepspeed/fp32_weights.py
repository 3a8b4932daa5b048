"""Starts the masters from the fp32 model; DeepSpeed makes them from the parameters in the compute format, and rounds them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from unishard.config import Config
from unishard_deepspeed import fields
from unishard_deepspeed.inner_optimizer import InnerOptimizer

__all__ = ["put_right"]


@torch.no_grad()
def put_right(cfg: Config, inner: InnerOptimizer, originals: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
    """After `deepspeed.initialize`: copy fp32 weights into the masters, and undo what stage 0 has done.

    Stage 0 with masters steps once when it is built (DeepSpeed 0.19.8, runtime/fp16/unfused_optimizer.py,
    initialize_optimizer_states): clearing the state undoes Adam's step count and moments, the weights its weight decay. It adds up,
    reduces and measures a parameter's own gradient, for which DeepSpeed refuses another format than the parameter's
    (runtime/engine.py, _do_optimizer_sanity_check); torch itself can let a bf16 or fp16 parameter have an fp32 gradient, and the
    optimizer takes whatever it finds.

    Args:
        cfg: What runs.
        inner: The torch optimizer.
        originals: Of each parameter, at stage 3 this rank's own part, else whole.
    """
    with_masters = fields.stage(cfg) == 0 and not fields.bare(cfg)
    if with_masters:
        inner.optimizer.state.clear()
    for parameter, value in originals:
        _set_master(parameter, value, inner.whole.get(parameter) if with_masters else None)
    if with_masters and cfg.precision.accumulate == "fp32":
        for parameter in inner.trained:
            parameter.grad_dtype = torch.float32


def _set_master(parameter: Any, value: Tensor, whole: Tensor | None) -> None:
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

    if whole is not None:
        whole.copy_(value)
    elif not hasattr(parameter, "ds_tensor"):
        safe_set_full_fp32_param(parameter, value)
    elif parameter.ds_tensor.numel():  # `safe_set_full_fp32_param` fails where the ranks do not divide a parameter
        safe_set_local_fp32_param(parameter, pad(value, (0, parameter.ds_tensor.numel() - value.numel())))
