"""DeepSpeed's modules and classes that the rows refer to."""

from __future__ import annotations

STAGE_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
STAGES_1_2 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
BF16 = "deepspeed.runtime.bf16_optimizer:BF16_Optimizer"
ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
INIT = "deepspeed.runtime.zero.partition_parameters:Init"
OFFLOAD = "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload"
FRAGMENT = "deepspeed.utils.tensor_fragment:tensor_fragment"

RUN = "0.19.8"
"""Versions on which every case was run."""

TAG = "https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed"
SOURCE = {
    "stage-3": f"{TAG}/runtime/zero/stage3.py",
    "stages-1-2": f"{TAG}/runtime/zero/stage_1_and_2.py",
    "bf16-stage-1": f"{TAG}/runtime/bf16_optimizer.py",
    "stage-0": f"{TAG}/runtime/fp16/unfused_optimizer.py",
    "engine": f"{TAG}/runtime/engine.py",
}


def of(owner: str, *names: str) -> tuple[str, ...]:
    """Attributes of one class, or names of one module."""
    return tuple(f"{owner}{'.' if ':' in owner else ':'}{name}" for name in names)
