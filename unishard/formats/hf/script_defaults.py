"""What scripts around TrainingArguments assume where a file is silent, and transformers does not.

ms-swift 3 and 4: swift/trainers/arguments.py, swift/llm/argument/train_args.py. LLaMA-Factory 0.9:
src/llamafactory/model/model_utils/ checkpointing.py, which checkpoints every layer unless the script forbids it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.contract.entries import NOTHING, Key

__all__ = ["LLAMAFACTORY", "swift", "with_script_defaults"]

_SWIFT = ("tuner_type", "train_type", "sft_type", "split_dataset_ratio")
"""Keys that only ms-swift has; the first three say which parameters train."""
_SWIFT_SILENT: Mapping[str, Any] = {
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "lr_scheduler_type": "cosine",
    "per_device_train_batch_size": 1,
    "gradient_checkpointing": True,
    # 16 samples an update over all ranks, which only the launch knows.
    "gradient_accumulation_steps": NOTHING,
}
_FULL_RATE, _ADAPTER_RATE = 1e-5, 1e-4


def with_script_defaults(keys: Mapping[str, Key], data: Mapping[str, Any]) -> Mapping[str, Key]:
    """The rows with what the file's script assumes; those that the script says nothing about stay."""
    silent = _silent(data)
    return {name: row._replace(tool_default=silent[name]) if name in silent else row for name, row in keys.items()}


LLAMAFACTORY: Mapping[str, Any] = {"disable_gradient_checkpointing": False}
"""What LLaMA-Factory assumes."""


def swift(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """What ms-swift assumes, which depends on the parameters that train."""
    full = "full" in (data.get(key) for key in _SWIFT[:3])
    return {**_SWIFT_SILENT, "learning_rate": _FULL_RATE if full else _ADAPTER_RATE}


def _silent(data: Mapping[str, Any]) -> Mapping[str, Any]:
    if any(key in data for key in _SWIFT):
        return swift(data)
    return LLAMAFACTORY if "finetuning_type" in data and "stage" in data else {}
