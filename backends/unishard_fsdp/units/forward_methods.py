"""Run a function as a forward of a sharded module, with FSDP2's work before and after it, by public API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

_NAME = "_unishard_forward"


def run_as_forward(module: nn.Module, function: Callable[..., Any], *inputs: Any) -> Any:
    """Run a function of tensors in place of the module's forward.

    Args:
        module: What `fully_shard` was called on.
        function: A method of the module for the length of the call.
        inputs: For the function.
    """
    vars(module)[_NAME] = function
    try:
        register_fsdp_forward_method(module, _NAME)
        return getattr(module, _NAME)(*inputs)
    finally:
        vars(module).pop(_NAME)
