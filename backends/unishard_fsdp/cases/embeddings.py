"""Embeddings whose weights are not gathered in backward."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import cast, final

from torch import nn
from torch.distributed.fsdp import FSDPModule

from unishard_fsdp.cases.case import FSDPCase


@final
class UngatheredEmbeddings(FSDPCase):
    """Gathers them again once the user registers a hook on one, which may compute with its weight.

    Its backward then needs the weight, whose memory FSDP2 has freed: torch 2.13 would end in a segmentation fault.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Hold the sharded embeddings."""
        self._modules = list(modules)

    def backward(self, *, last: bool) -> AbstractContextManager[None]:
        """Look at the hooks. One after the forward finds only a shard of the weight."""
        for module in [module for module in self._modules if any(map(_is_foreign, module._forward_pre_hooks.values()))]:
            cast(FSDPModule, module).set_unshard_in_backward(True)
            self._modules.remove(module)
        return nullcontext()


def _is_foreign(hook: object) -> bool:
    return not str(getattr(hook, "__module__", "")).startswith(("torch.distributed.", "unishard"))
