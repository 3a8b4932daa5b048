"""The names of the tensors in a checkpoint."""

from __future__ import annotations

PARAMETERS = "model."
"""Prefix of the names of parameters and persistent buffers."""
OPTIMIZER = "optim.state."
"""Prefix of a parameter's name and an optimizer state key, as torch flattens an optimizer's state (torch 2.13,
state_dict.py)."""
MATRICES = "matrices."
"""Prefix of a parameter's name and a key of what an optimizer keeps of it as a whole matrix."""
AVERAGES = "ema."
"""Prefix of the name of a parameter of which a moving average is kept."""
RANDOM = "rng."
"""Prefix of a rank and a random number generator."""
BUFFERS = "buffers."
"""Prefix of a rank and a buffer of which ranks have values of their own, and of `base` and one that is summed."""
STATE = "state."
"""Prefix of the user's own state."""
EXTRA_STATE = "extra_state."
"""Prefix of the modules' extra state."""


def of_optimizer(parameter: str, key: str) -> str:
    """The name of one tensor of a parameter's optimizer state, such as `exp_avg`."""
    return f"{OPTIMIZER}{parameter}.{key}"


def optimizer_part(name: str) -> tuple[str, str] | None:
    """The parameter's name and the optimizer state key; None for any other tensor."""
    if not name.startswith(OPTIMIZER):
        return None
    parameter, _, key = name.removeprefix(OPTIMIZER).rpartition(".")
    return parameter, key


def parameter_of(name: str) -> str | None:
    """The name of the parameter or buffer; None for any other tensor."""
    return name.removeprefix(PARAMETERS) if name.startswith(PARAMETERS) else None
