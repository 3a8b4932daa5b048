"""Trainable parameters that a script freezes for some forwards, as PEFT's `disable_adapter` does for a reference."""

from __future__ import annotations

from operator import attrgetter

from torch import nn

from unishard_fsdp.dimensionless import parameter_named

_requires_grad = attrgetter("requires_grad")
"""In C, since it is asked of every parameter before every forward."""


class ToggledParameters:
    """Finds parameters whose shards stay frozen although the script has unfrozen them.

    A gathered parameter is another tensor than its shard, and gets its `requires_grad` when it is gathered, never the
    other way around (torch 2.13, _fully_shard/_fsdp_param.py, to_unsharded). So a parameter that is frozen while it is
    sharded, and unfrozen after a forward that left it gathered, would be frozen again in the next window.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._found = False
        self.watch()

    def watch(self) -> None:
        """Take those as trainable that are so now. Called while all are sharded."""
        self._shards = {name: shard for name, shard in self._module.named_parameters() if shard.requires_grad}

    def look(self) -> bool:
        """Before a forward: whether a shard is frozen."""
        frozen = not self.all_trainable()
        self._found = self._found or frozen
        return frozen

    def all_trainable(self) -> bool:
        """Whether no shard is frozen."""
        return all(map(_requires_grad, self._shards.values()))

    def restore(self) -> None:
        """Before parameters are sharded again: unfreeze the shards of those that are gathered and unfrozen."""
        if self._found:
            self._found = False
            for name, shard in self._shards.items():
                if not shard.requires_grad and parameter_named(self._module, name).requires_grad:
                    shard.requires_grad_(True)
