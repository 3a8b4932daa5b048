"""The floating dtypes of a config as torch dtypes, the names of torch dtypes, and what a model keeps in fp32."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By the name in the config."""
_KEPT: Mapping[str, tuple[str, ...]] = {
    "fp32": (),
    "bf16": ("_keep_in_fp32_modules_strict",),
    "fp16": ("_keep_in_fp32_modules_strict", "_keep_in_fp32_modules"),
}
"""Which lists of transformers' classes name what stays in fp32 where all else has a dtype (transformers 5.23,
modeling_utils.py, _get_dtype_plan)."""


def name_of(dtype: torch.dtype) -> str:
    """The name without `torch.`, such as `float32`: as it is written in a manifest and in a model's `config.json`."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The inverse of `name_of`.

    Raises:
        ValueError: torch has no dtype of this name.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype


def floating_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Floating-point parameters and buffers, under all their names."""
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        if tensor.is_floating_point():
            yield name, tensor


def declared_by(model: nn.Module, dtype: str) -> set[str]:
    """Names of parameters and buffers that the classes of a model keep in fp32 in a model of this dtype."""
    names: set[str] = set()
    for path, module in model.named_modules(remove_duplicate=False) if _KEPT[dtype] else ():
        patterns = (pattern for attribute in _KEPT[dtype] for pattern in getattr(module, attribute, None) or ())
        if combined := "|".join(pattern.replace("*", ".*") for pattern in patterns):
            prefix = f"{path}." if path else ""
            names |= {prefix + name for name, _ in floating_tensors(module) if re.search(combined, name)}
    return names
