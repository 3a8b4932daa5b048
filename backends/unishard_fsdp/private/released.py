"""Forget that modules were sharded: `fully_shard` refuses those that have a state (torch 2.13,
_composable_state.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed import _composable_state


def forget_states(modules: Iterable[nn.Module]) -> None:
    """Forget the states of modules that are plain again."""
    for module in modules:
        _composable_state._module_state_mapping.pop(module, None)
