"""Refuse a DeepSpeed config that transformers holds: it changes what its models compute."""

from __future__ import annotations

import sys
from typing import Any

from unishard.errors import ModelError


def refuse_zero3_of_transformers() -> None:
    """Check that transformers does not take this process for a run of ZeRO-3 of its own. Not collective.

    Raises:
        ModelError: It does.
    """
    # Whoever made such a config has imported the module. Who asks `is_deepspeed_zero3_enabled`, in transformers 5.23:
    # from_pretrained (modeling_utils.py), which partitions; models with LayerDrop, which run every layer; tied weights
    # and resized embeddings.
    deepspeed: Any = sys.modules.get("transformers.integrations.deepspeed")
    if deepspeed is not None and deepspeed.is_deepspeed_zero3_enabled():
        raise ModelError(
            "transformers holds a DeepSpeed config of stage 3, from HfDeepSpeedConfig(...), "
            "TrainingArguments(deepspeed=...) or Accelerate's DeepSpeedPlugin; with it, its models partition the "
            "weights that they load and run without LayerDrop; remove it from the script: the config of "
            "unishard.prepare says how the model is sharded"
        )
