"""What the runs share in which a fault happens."""

from __future__ import annotations

from typing import Any

import unishard
from dev.ranks.training import checked as config
from unishard.testing.models import MODELS

TIMEOUT = 2.0
"""`communication.desync_timeout`."""
BAD = 13
"""The update in which the fault happens: one whose calls are not checked one by one. The one before it is saved."""


def prepared(backend: str, strategy: Any = "full_shard", **sections: Any) -> Any:
    """An engine of the tiny MLP."""
    cfg = config(backend, strategy, communication={"desync_timeout": TIMEOUT}, **sections)
    return unishard.prepare(MODELS["mlp"].build(), cfg)
