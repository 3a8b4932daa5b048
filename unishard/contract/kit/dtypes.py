"""Cast a model to the config's dtypes before it is sharded, the same for every engine."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from unishard.config import Precision
from unishard.contract.kit.kept_fp32 import is_kept
from unishard.distributed.dtypes import DTYPES


@torch.no_grad()
def cast_model(model: nn.Module, cfg: Precision, *, train: bool = True) -> None:
    """Cast the trainable parameters to `precision.master`, and the buffers to `precision.buffers`, in place.

    So a model loaded in bf16 has fp32 master weights on every engine: DeepSpeed creates them itself, but FSDP2 would
    update bf16 weights. Frozen parameters keep their dtype, because nothing updates them. What `precision.keep_fp32`
    keeps becomes fp32. Parameters stay the same objects and stay tied.

    Args:
        model: The full model, not sharded.
        cfg: The section `precision`, with `master` and `buffers`.
        train: Whether there are master weights.
    """
    master = DTYPES[cfg.master]
    for parameter in model.parameters():
        trained = train and parameter.requires_grad
        if trained and parameter.dtype != master:
            parameter.data = parameter.data.to(master)
            parameter.grad = None
        elif not trained and is_kept(parameter):
            parameter.data = _at_least_fp32(parameter.data)
    for buffer in model.buffers():
        if is_kept(buffer):
            buffer.data = _at_least_fp32(buffer.data)
        elif cfg.buffers != "keep" and buffer.is_floating_point():
            buffer.data = buffer.data.to(DTYPES[cfg.buffers])


def _at_least_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.itemsize < torch.float32.itemsize else tensor


def cast_to_compute(tensors: Iterable[Tensor], cfg: Precision) -> None:
    """Cast floating-point parameters to `precision.compute`, but for those kept in fp32, and freeze all; buffers keep
    their dtype.
    """
    dtype = DTYPES[cfg.compute]
    for tensor in tensors:
        if isinstance(tensor, nn.Parameter):
            tensor.requires_grad_(False)
            if tensor.is_floating_point() and not is_kept(tensor):
                tensor.data = tensor.data.to(dtype)
