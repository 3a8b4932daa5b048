"""How matrix products of fp32 tensors are computed: one setting of torch for the whole process."""

from __future__ import annotations

import torch

from unishard.config import Precision
from unishard.errors import ConfigError, Problem

_WORDS = {"fp32": "highest", "tf32": "high"}
_matmul_asked: set[str] = set()
"""What an earlier `prepare` of this process has set; one value at most."""


def check_matmul(precision: Precision) -> None:
    """Check that no earlier `prepare` has set another value: it would change for that model, too. Not collective.

    Raises:
        ConfigError: One has.
    """
    for earlier in _matmul_asked - {precision.matmul, "keep"} if precision.matmul != "keep" else ():
        message = (
            f"is {precision.matmul}, but an earlier prepare of this process has set {earlier}, and torch has one "
            f"setting for all models; write {earlier} or keep, or use another process"
        )
        raise ConfigError([Problem("precision.matmul", message)])


def set_matmul(precision: Precision) -> None:
    """Set it, unless it is `keep`. Not collective."""
    if precision.matmul != "keep":
        torch.set_float32_matmul_precision(_WORDS[precision.matmul])
        _matmul_asked.add(precision.matmul)
