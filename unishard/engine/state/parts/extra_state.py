"""What modules return from `get_extra_state`, which torch keeps in a state dict beside their tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from unishard.checkpoint import tensor_names
from unishard.checkpoint.user_state import pack
from unishard.distributed.on_ranks import on_all
from unishard.engine.state.part import CheckpointSource, Part, Saved, whole


class ExtraState(Part):
    """Rank 0's is saved."""

    def __init__(self, model: nn.Module) -> None:
        """Of the modules of a model."""
        self._modules = {
            name: module
            for name, module in model.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }
        self._states: dict[str, Any] = {}

    def saved(self, group: dist.ProcessGroup) -> Saved:
        """As in `Part`."""
        packed, tensors = on_all(group, self._packed)
        return Saved({} if dist.get_rank() else whole(tensors), {"extra_state": packed})

    def check(self, source: CheckpointSource) -> None:
        """As in `Part`."""
        self._states = source.unpack(source.manifest.extra_state) or {}

    def read(self, source: CheckpointSource) -> None:
        """As in `Part`: `set_extra_state` is the user's, and may fail."""
        for name, module in self._modules.items():
            if name in self._states:
                module.set_extra_state(self._states[name])

    def resume(self, source: CheckpointSource, group: dist.ProcessGroup) -> Iterator[str]:
        """As in `Part`."""
        for name in self._modules:
            if name not in self._states:
                yield f"it lacks the extra state of {name or 'the model'}, which stays as it is"
        for name in self._states:
            if name not in self._modules:
                yield f"its extra state of {name or 'the model'} is not loaded: the model has no such module"

    def _packed(self) -> tuple[Any, dict[str, Tensor]]:
        states = {name: module.get_extra_state() for name, module in self._modules.items()}
        return pack(states or None, tensor_names.EXTRA_STATE)
