"""Trainable parameters that a script freezes for some forwards, as PEFT's `disable_adapter` does for a reference."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import final

from torch import nn

from unishard_fsdp.cases.case import FSDPCase
from unishard_fsdp.private import PRIVATE_API
from unishard_fsdp.units.dimensionless import parameter_named

_DTYPES = PRIVATE_API["trainable-dtypes"]
_requires_grad = attrgetter("requires_grad")
"""In C, since it is asked of every parameter before every forward."""


@final
class ToggledParameters(FSDPCase):
    """Unfreezes shards that stay frozen although the script has unfrozen them. Every run has it: `requires_grad_` may
    be called at any time, and tells nobody.

    A gathered parameter is another tensor than its shard, and gets its `requires_grad` when it is gathered, never the
    other way around (torch 2.13, _fully_shard/_fsdp_param.py, to_unsharded). So a parameter that is frozen while it is
    sharded, and unfrozen after a forward that left it gathered, would be frozen again in the next window. And in its
    first forward FSDP2 determines the dtypes of gradients from the parameters that train then.
    """

    def __init__(self, module: nn.Module, sharded: Sequence[nn.Module], *, mixed: bool) -> None:
        """Take the parameters as trainable that are so now.

        Args:
            module: The model.
            sharded: Its sharded modules.
            mixed: Whether it computes in 16 bits.
        """
        self._module, self._sharded, self._mixed = module, sharded, mixed
        self._ran = self._found = self._stale = False
        """Whether a forward has run, a shard was frozen in one since all were sharded, and dtypes are to be determined
        again."""
        self.watch()

    def watch(self) -> None:
        """Take those as trainable that are so now. Called while all are sharded."""
        self._shards = {name: shard for name, shard in self._module.named_parameters() if shard.requires_grad}

    def change(self, *, for_good: bool) -> None:
        """Called before `requires_grad` changes, `for_good` or inside a block.

        Raises:
            BackendError: Dtypes are to be determined again, and this torch lacks a private name for that.
        """
        if self._mixed and (for_good or not self._ran):
            _DTYPES.require()
            self._stale = True

    def before_forward(self) -> None:
        """Look whether a shard is frozen."""
        if not self._all_trainable():
            self._found = True
            self.change(for_good=False)
        self._ran = True

    def backward(self, *, last: bool) -> AbstractContextManager[None]:
        """Determine dtypes again if they are those of frozen parameters."""
        self.before_reshard()
        if self._stale:
            if _DTYPES.needed:
                from unishard_fsdp.private.leaves import refresh_trainable

                refresh_trainable(self._sharded)
            self._stale = not self._all_trainable()
        return nullcontext()

    def before_reshard(self) -> None:
        """Unfreeze the shards of those that are gathered and unfrozen."""
        if self._found:
            self._found = False
            for name, shard in self._shards.items():
                if not shard.requires_grad and parameter_named(self._module, name).requires_grad:
                    shard.requires_grad_(True)

    def _all_trainable(self) -> bool:
        return all(map(_requires_grad, self._shards.values()))
