"""Parameter groups without parameters, such as the one that a framework makes for biases where adapters have none."""

from __future__ import annotations

import warnings

import torch


def without_empty(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer, or one with the same state and group dicts that lacks the groups without parameters.

    DeepSpeed takes these out of the object that it is given (DeepSpeed 0.19.8, runtime/engine.py,
    _configure_optimizer), and a scheduler of the caller's has a rate for each.
    """
    filled = [group for group in optimizer.param_groups if group["params"]]
    if len(filled) == len(optimizer.param_groups):
        return optimizer
    own: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(own).update(vars(optimizer), param_groups=filled)
    vars(own).pop("step", None)  # a scheduler has set a `step` that is bound to `optimizer`
    let_copy_step()
    return own


def let_copy_step() -> None:
    """Silence a scheduler's warning that its optimizer does not step where a copy of it does (torch 2.13,
    optim/lr_scheduler.py).
    """
    warnings.filterwarnings(
        "ignore", r"Detected call of `lr_scheduler.step\(\)` before `optimizer.step\(\)`", UserWarning
    )
