"""The oldest DeepSpeed that keeps what unishard promises. Imports neither torch nor DeepSpeed."""

from __future__ import annotations

import re

from unishard.contract.installed import version_of
from unishard.errors import BackendError

OLDEST = (0, 19, 8)
"""The first version in which stage 2 with bf16 or fp16 accumulates and reduces in fp32
(runtime/zero/stage_1_and_2.py)."""


def require_version() -> None:
    """Check the installed version.

    Raises:
        BackendError: It is too old.
    """
    installed = version_of("deepspeed")
    if tuple(map(int, re.findall(r"\d+", installed)[:3])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise BackendError(
            f"backend deepspeed needs deepspeed>={oldest}; {installed} is installed, which in shard_grad_op with bf16 "
            f"rounds gradients that should accumulate in fp32; pip install -U 'deepspeed>={oldest}'"
        )
