"""Gather a sharded model's root parameters for `generate`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method


@contextmanager
def gathering_in_generate(module: nn.Module) -> Iterator[None]:
    """Gather parameters outside units: `generate` may run an encoder, or the model inside an adapter, without the
    root's forward.
    """
    before = vars(module).get("generate")
    register_fsdp_forward_method(module, "generate")
    try:
        yield
    finally:
        if before is None:
            vars(module).pop("generate", None)
        else:
            vars(module)["generate"] = before
