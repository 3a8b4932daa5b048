"""The floating dtypes of a config as torch dtypes, and the names of torch dtypes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By the name in the config."""


def name_of(dtype: torch.dtype) -> str:
    """The name without `torch.`, such as `float32`: as it is written in a manifest and in a model's `config.json`."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The inverse of `name_of`.

    Raises:
        ValueError: torch has no dtype of this name.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return found
