"""Configs of other tools that are given as one of unishard: said once, not for each of their keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KEYS = {
    "DeepSpeed": "zero_optimization train_batch_size train_micro_batch_size_per_gpu gradient_clipping steps_per_print "
    "bf16 fp16",
    "Accelerate": "distributed_type compute_environment fsdp_config deepspeed_config num_processes num_machines "
    "mixed_precision",
    "transformers' TrainingArguments": (
        "output_dir per_device_train_batch_size per_device_eval_batch_size num_train_epochs learning_rate max_steps "
        "fsdp deepspeed"
    ),
    "Lightning": "trainer fit accelerator devices max_epochs gradient_clip_val",
    "axolotl": "base_model sequence_len datasets micro_batch_size num_epochs",
    "torchtitan": "job model parallelism metrics lr_scheduler",
}
"""Top-level keys by tool; none is a field here. The formats themselves tell more (`unishard.formats.catalog`), in a
room above."""

_NOT_TRANSLATED = ("axolotl", "torchtitan")

_ENOUGH = 2
"""Keys of one tool; one may be a slip."""


def other_tool(data: Any, file: str = "") -> str:
    """Which tool a document is for, and what to do; empty for a config of unishard.

    Args:
        data: The content of the document.
        file: Where it stands, if it is in a file.
    """
    if not isinstance(data, Mapping) or "backend" in data:
        return ""
    keys_of_tool = {tool: [key for key in keys.split() if key in data] for tool, keys in _KEYS.items()}
    tool = max(keys_of_tool, key=lambda name: len(keys_of_tool[name]))
    if len(keys_of_tool[tool]) < _ENOUGH:
        return ""
    message = f"is a config of {tool} ({', '.join(keys_of_tool[tool][:3])}), not of unishard"
    if tool in _NOT_TRANSLATED:
        return f"{message}, and unishard does not translate it; run `unishard init`"
    return f"{message}; translate it: unishard translate {file or 'FILE'} --to unishard -o train.yaml"
