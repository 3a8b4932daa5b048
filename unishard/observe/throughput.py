"""Count what a forward gets, and how many floating-point operations a training step of it takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unishard.contract.adapter import ShardedModel
from unishard.distributed.nested_tensors import tensors_in


class Work(NamedTuple):
    """What one forward processes."""

    samples: int
    """Length of the first dimension."""
    tokens: int
    """Elements of the token ids; 0 if there are none."""
    length: int
    """Tokens of a sample."""


def work_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Work:
    """What a forward processes: its `input_ids`, or the first tensor of its arguments.

    A tensor of token ids is `input_ids`, or holds int32 or int64 in two dimensions. Reads shapes only, so the host does
    not wait.
    """
    ids = kwargs.get("input_ids")
    tokens = ids if isinstance(ids, Tensor) else next(tensors_in([args, kwargs]), None)
    if tokens is None or not tokens.dim():
        return Work(0 if tokens is None else 1, 0, 0)
    counts = tokens is ids or (tokens.dim() == 2 and tokens.dtype in (torch.int32, torch.int64))
    return Work(len(tokens), tokens.numel() if counts else 0, tokens.shape[-1] if counts else 0)


class Flops(NamedTuple):
    """Floating-point operations of a training step for one token."""

    fixed: float
    """Those of matrix products with weights."""
    per_length: float
    """Those of attention, for each token of the sample."""


def flops_per_token(adapter: ShardedModel) -> Flops:
    """Floating-point operations of forward and backward for one token, without recomputation: those that MFU counts.

    A weight of a matrix takes 2 in the forward, 2 in the backward for its input and, if it is trained, 2 for its own
    gradient: 6 N in all (Kaplan et al. 2020, arXiv:2001.08361, section 2.1). N leaves out embedding tables that no
    matrix product uses (a tied one counts). Attention takes 12 x layers x hidden size x length (Chowdhery et al. 2022,
    PaLM, arXiv:2204.02311, appendix B, which defines MFU); layers and hidden size are those of `model.config`, as
    transformers names them, and attention counts as 0 without it. A causal mask is not subtracted, as there. The
    formula is that of dense transformers: it counts all experts of a mixture.
    """
    module = adapter.module
    tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    multiplied = {id(part.weight) for part in module.modules() if isinstance(part, nn.Linear)}
    fixed = 0.0
    for parameter in module.parameters():
        if id(parameter) not in tables or id(parameter) in multiplied:
            fixed += (6 if parameter.requires_grad else 4) * adapter.master_shard(parameter).shape.numel()
    config = getattr(module, "config", None)
    layers, width = getattr(config, "num_hidden_layers", None), getattr(config, "hidden_size", None)
    known = isinstance(layers, int) and isinstance(width, int)
    return Flops(fixed, 12.0 * layers * width if known else 0.0)  # type: ignore[operator]


PEAKS: Mapping[str, float] = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165.2e12,
    "RTX A6000": 154.8e12,
    "MI300X": 1307e12,
    "MI250X": 191.5e12,
}
"""Dense bf16 and fp16 operations per second, by words in the device's name (`torch.cuda.get_device_name`).

From the vendors' data sheets: NVIDIA GB200, B200, GH200, H200, H100, H800, H20, A100, A800, A40, A30, A10, L40S, L4,
RTX A6000, and the white paper of the Ada architecture (RTX 4090); AMD Instinct MI300X, and MI250X, which is two
devices. Where only a value with 2:4 sparsity is given, half of it. A name with more words comes before the one that it
contains.
"""


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """The device's peak in a 16-bit compute dtype; None for fp32, for a CPU and for a device that is not in the table.

    Args:
        device: Where this rank computes.
        dtype: `precision.compute`.
    """
    if device.type != "cuda" or dtype == "fp32":
        return None
    name = torch.cuda.get_device_name(device).replace("-", " ").upper()
    return next((peak for words, peak in PEAKS.items() if set(words.upper().split()) <= set(name.split())), None)
