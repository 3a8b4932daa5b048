"""The step of the groups that are not matrices: torch's AdamW, element by element."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

ADAMW: Mapping[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "fused": True}
"""The defaults of such a group: those of `torch.optim.AdamW`, fused."""


def first_state(tensor: Tensor) -> dict[str, Any]:
    """The state of a tensor before its first update, as `torch.optim.AdamW` creates it (torch 2.13, optim/adam.py)."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=tensor.device),
        "exp_avg": torch.zeros_like(tensor, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(tensor, memory_format=torch.preserve_format),
    }


def step_adamw(group: Mapping[str, Any], state: MutableMapping[Any, dict[str, Any]]) -> None:
    """Update the parameters of a group that have a gradient."""
    parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
    for parameter in parameters:
        if not state[parameter]:
            state[parameter].update(first_state(parameter))
    if parameters:
        update(parameters, [each.grad for each in parameters], [state[each] for each in parameters], group)


def update(
    weights: Sequence[Tensor], gradients: Sequence[Tensor], states: Sequence[dict[str, Any]], group: Mapping[str, Any]
) -> None:
    """Update tensors.

    Args:
        weights: The tensors.
        gradients: Of each.
        states: Of each, see `first_state`.
        group: Their options.
    """
    adamw(
        [*weights],
        [*gradients],
        [each["exp_avg"] for each in states],
        [each["exp_avg_sq"] for each in states],
        [],
        [each["step"] for each in states],
        fused=group.get("fused", True),
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
