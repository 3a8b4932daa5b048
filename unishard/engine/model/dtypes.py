"""Brings a model into the number formats that the config asks for, the same for every engine, before it is sharded."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from unishard.config import Precision

__all__ = ["DTYPES", "cast_model"]

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By the word in the config."""


@torch.no_grad()
def cast_model(model: nn.Module, cfg: Precision, *, train: bool = True) -> None:
    """Cast the trainable parameters to the format of the masters, and the buffers where another one is asked for, in place.

    So a model that was loaded in bf16 has fp32 masters on every engine: DeepSpeed makes them itself, FSDP2 would update bf16
    weights. Frozen parameters keep their format, since nothing updates them. Parameters stay the same objects, and ties stay.

    Args:
        model: Whole, not sharded.
        cfg: `master` and `buffers` of the config.
        train: Whether there are masters.
    """
    master = DTYPES[cfg.master]
    for parameter in model.parameters():
        if train and parameter.requires_grad and parameter.dtype != master:
            parameter.data = parameter.data.to(master)
            parameter.grad = None
    if cfg.buffers == "keep":
        return
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(DTYPES[cfg.buffers])
