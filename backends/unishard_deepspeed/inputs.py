"""Casts inputs where parameters are in bf16, as FSDP2's `cast_forward_inputs` does, so that both engines take the same models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.utils import _cast_forward_inputs  # private; FSDP1's own, over the same containers as FSDP2's
from torch.utils.hooks import RemovableHandle

__all__ = ["cast_to_bf16"]


def cast_to_bf16(model: nn.Module, units: Iterable[str]) -> list[RemovableHandle]:
    """Cast the floating-point inputs of the root and of the units, positional and by keyword, before each forward.

    Reaches into lists, tuples, dicts and dataclasses.

    Args:
        model: The root.
        units: Names of modules in it.

    Returns:
        What removes it.
    """
    modules = [model, *(model.get_submodule(name) for name in units)]
    # First of a module's hooks, so that DeepSpeed's own see what the module sees.
    return [module.register_forward_pre_hook(_cast, prepend=True, with_kwargs=True) for module in modules]


def _cast(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    return _cast_forward_inputs(torch.bfloat16, *args, **kwargs)
