"""The modules whose parameters an engine gathers together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn


@dataclass(frozen=True, slots=True)
class Unit:
    """A module whose parameters are gathered together."""

    name: str
    """Name in `model.named_modules()`."""
    module: nn.Module
    is_embedding: bool = field(init=False)
    """Whether it is torch's table of embeddings and nothing else, whose gradient depends on the indices and not on the
    weights.

    Decided when it is found, before `prepare` adds hooks and functions of its own.
    """

    def __post_init__(self) -> None:
        """Look for what may compute with the weights, as the hook of `torch.nn.utils.spectral_norm` does."""
        module = self.module
        added = bool(module._forward_pre_hooks or module._forward_hooks) or "forward" in vars(module)
        object.__setattr__(self, "is_embedding", type(module) is nn.Embedding and not added)

    @property
    def numel(self) -> int:
        """Elements of all its parameters."""
        return numel_of(self.module)


class ModelUnits(NamedTuple):
    """The units that `prepare` found in a model."""

    gathered: Sequence[Unit]
    """Modules whose parameters are gathered together; empty with `no_shard`."""
    casting: Sequence[Unit]
    """Modules that, like the root, cast their inputs to `precision.compute`: those gathered; with `no_shard`, the
    default units."""
    conditional: Sequence[Unit]
    """Modules that a rank may skip in a micro-batch."""


def numel_of(module: nn.Module) -> int:
    """Elements of a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())
