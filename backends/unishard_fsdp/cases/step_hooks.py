"""The hooks around the steps of an optimizer, and of every optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

_OWN = ("unishard", "unishard_fsdp")
"""Packages whose hooks are not the user's."""


class StepHooks:
    """Knows whether the user has registered some."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Find where torch keeps them: each handle says it, and no other public name does."""
        handles: list[Any] = [
            register(_nothing)
            for register in (
                optimizer.register_step_pre_hook,
                optimizer.register_step_post_hook,
                register_optimizer_step_pre_hook,
                register_optimizer_step_post_hook,
            )
        ]
        self._tables = [handle.hooks_dict_ref for handle in handles]
        for handle in handles:
            handle.remove()

    def of_others(self) -> bool:
        """Whether a step would call one of the user's."""
        hooks = [hook for table in self._tables for hook in (table() or {}).values()]
        return any((getattr(hook, "__module__", None) or "").partition(".")[0] not in _OWN for hook in hooks)


def _nothing(*step: Any) -> None:
    """A hook that does nothing."""
