"""What Hydra makes of a file: the files that it adds, and a Trainer of Lightning's that it builds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_OF_HYDRA = ("_self_", "hydra/", "override hydra/", "override /hydra/")
"""What a list of defaults may name without another file of the user's."""
_LIGHTNING = re.compile(r"(pytorch_)?lightning\..*(Trainer|Fabric|Strategy)")


def composed(defaults: Any) -> list[str]:
    """The files of the user that a list of defaults names, as it names them."""
    named = [_group(item) for item in defaults] if isinstance(defaults, list) else []
    return [name for name in named if not name.startswith(_OF_HYDRA)]


def names_lightning(data: Mapping[str, Any]) -> bool:
    """Whether Hydra makes a Trainer, a Fabric or a strategy of Lightning's from a file."""
    return _LIGHTNING.fullmatch(str(data.get("_target_", ""))) is not None


def _group(item: Any) -> str:
    return ", ".join(f"{key}: {value}" for key, value in item.items()) if isinstance(item, Mapping) else str(item)
