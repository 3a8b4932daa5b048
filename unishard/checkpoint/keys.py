"""The names of the tensors in a checkpoint."""

from __future__ import annotations

__all__ = ["OPTIMIZER", "PARAMETERS", "RANDOM", "STATE", "of_optimizer", "optimizer_part", "parameter_of"]

PARAMETERS = "model."
"""Before the name of a parameter or a persistent buffer."""
OPTIMIZER = "optim.state."
"""Before the name of a parameter and the optimizer's own key, as torch flattens an optimizer's state (torch 2.13, state_dict.py)."""
RANDOM = "rng."
"""Before a rank and a kind of random numbers."""
STATE = "state."
"""Before what the user saved."""


def of_optimizer(parameter: str, key: str) -> str:
    """The name of one tensor of a parameter's optimizer state, such as `exp_avg`."""
    return f"{OPTIMIZER}{parameter}.{key}"


def optimizer_part(name: str) -> tuple[str, str] | None:
    """The parameter and the optimizer's key; None for a tensor of another kind."""
    if not name.startswith(OPTIMIZER):
        return None
    parameter, _, key = name.removeprefix(OPTIMIZER).rpartition(".")
    return parameter, key


def parameter_of(name: str) -> str | None:
    """The parameter or buffer; None for a tensor of another kind."""
    return name.removeprefix(PARAMETERS) if name.startswith(PARAMETERS) else None
