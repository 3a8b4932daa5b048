"""DeepSpeed's keys: one row for each, from which the constants, the accepted values and the check of `native.deepspeed`
follow.
"""

from __future__ import annotations

from unishard_deepspeed.keys.row import Row, Use
from unishard_deepspeed.keys.table import CONSTANTS, ROWS, TAKES, spellings, used

__all__ = ["CONSTANTS", "ROWS", "TAKES", "Row", "Use", "spellings", "used"]
