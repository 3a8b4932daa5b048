"""Private names of DeepSpeed that some runs need, by case; the modules here use them. Imports no torch.

A case that differs between DeepSpeed's optimizers has one entry for each, with one of these suffixes:

| name | runs | class |
|----------------|-----------------------------------------------------------------------|----------------------------------|
| `stage-0` | `no_shard` | torch's, or FP16_UnfusedOptimizer |
| `stages-1-2` | `shard_optimizer`, `shard_grad_op`, `hybrid_shard_grad_op` | DeepSpeedZeroOptimizer |
| `stage-3` | `full_shard`, `hybrid_shard` | DeepSpeedZeroOptimizer_Stage3 |
"""

from __future__ import annotations

from unishard.contract.private_api import by_name
from unishard_deepspeed.private.table import OF_STAGE_0, OF_STAGE_3, OF_STAGES_1_2, OTHERS

__all__ = ["PRIVATE_API"]

_OF_STAGES = (case for cases in (OF_STAGE_0, OF_STAGES_1_2, OF_STAGE_3) for case in cases if case.names)
PRIVATE_API = by_name(*OTHERS, *_OF_STAGES)
