"""What was made of a module's forward before the engine is built: recomputed, or compiled."""

from __future__ import annotations

from torch import nn


def recomputes(module: nn.Module) -> bool:
    """Whether a module runs its forward again in backward."""
    return getattr(vars(module).get("forward"), "recomputes", False)


def is_compiled(module: nn.Module) -> bool:
    """Whether a module's forward is compiled as a block."""
    return getattr(vars(module).get("forward"), "compiles", False)
