"""The parameters of a sharded module."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from unishard_fsdp.units.dimensionless import parameter_named


def own_names(module: nn.Module) -> dict[str, None]:
    """Names of a sharded module's parameters, without those of sharded modules inside it."""
    return dict.fromkeys(name for name, _ in _own(module, ""))


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The same parameters, which their modules may show without dimensions."""
    return [parameter_named(module, name) for name in own_names(module)]


def _own(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in module.named_parameters(recurse=False):
        yield prefix + name, parameter
    for name, child in module.named_children():
        if not isinstance(child, FSDPModule):
            yield from _own(child, f"{prefix}{name}.")
