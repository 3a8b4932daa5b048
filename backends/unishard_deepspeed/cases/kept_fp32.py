"""Parameters that stay in fp32 in a 16-bit run (`precision.keep_fp32`).

DeepSpeed casts every parameter when it takes the model, and has no setting for that: `data_types.keep_in_fp32_modules`
is about buffers (DeepSpeed 0.19.8, runtime/keep_in_fp32.py). Afterwards it works in the dtype that it finds: stages 1
and 2 by optimizer group, stage 3 by parameter, stage 0 by gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from unishard.contract.kit.kept_fp32 import is_kept
from unishard.errors import ConfigError, Problem
from unishard_deepspeed import fields
from unishard_deepspeed.private.zero_optimizer import ZeroOptimizer
from unishard_deepspeed.spec import ZeroSpec


def check(model: nn.Module, spec: ZeroSpec, zero: type[ZeroOptimizer]) -> None:
    """Check that DeepSpeed can keep what is marked; `rules` refuses patterns with offload earlier.

    Raises:
        BackendError: A private name is missing.
        ConfigError: What the model's class names is offloaded, and would be rounded.
    """
    kept = [(name, each) for name, each in model.named_parameters() if is_kept(each)]
    trained = [(name, each) for name, each in kept if each.requires_grad]
    if trained:
        zero.cases.kept_parameters.require()
    if spec.zero["offload_param"]:
        place, offloaded = "params", kept
    else:
        place, offloaded = "optimizer", trained if spec.offloads_optimizer and not zero.gathers else []
    if offloaded:
        name, _ = offloaded[0]
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
