"""Lets a sharded model's `generate` find its parameters whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

__all__ = ["gathering_in_generate"]


@contextmanager
def gathering_in_generate(module: nn.Module) -> Iterator[None]:
    """Gather what lies in no unit: an encoder, or the model inside an adapter, runs without the forward of the root."""
    before = vars(module).get("generate")
    register_fsdp_forward_method(module, "generate")
    try:
        yield
    finally:
        if before is None:
            vars(module).pop("generate", None)
        else:
            vars(module)["generate"] = before
