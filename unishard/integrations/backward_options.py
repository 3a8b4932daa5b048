"""Options of a backward that scripts of a framework pass on to torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.errors import ContractError

__all__ = ["check"]

_WITHOUT_EFFECT = ("retain_graph", "scale_wrt_gas")
"""The graph is not needed again, since each backward has a forward of its own; DeepSpeed's own division."""


def check(options: Mapping[str, Any]) -> None:
    """Check that a backward asks for what engines do.

    Raises:
        ContractError: It asks for something else, such as `create_graph`.
    """
    if other := [name for name, value in options.items() if value and name not in _WITHOUT_EFFECT]:
        raise ContractError(
            f"backward has {other[0]}=, but an engine runs the backward of a scalar loss once, for all parameters; "
            "leave it out"
        )
