"""Access to a sharded module's parameter groups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def groups_of(modules: Iterable[Any]) -> list[Any]:
    """The parameter groups of sharded modules, in order; one per module before torch 2.12."""
    groups_of_module = []
    for module in modules:
        state = module._get_fsdp_state()
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        groups_of_module += [group for group in groups if group is not None]
    return groups_of_module


def has_no_gradient(parameter: Any) -> bool:
    """Whether a group's gathered parameter is trainable and has no gradient yet."""
    gathered = parameter.unsharded_param
    return bool(gathered.requires_grad) and gathered.grad is None and parameter.unsharded_accumulated_grad is None
