"""Sections of a script's own file in which people keep another tool's arguments."""

from __future__ import annotations

__all__ = ["ARGUMENTS", "SURE"]

ARGUMENTS = (
    "training",
    "training_args",
    "training_arguments",
    "trainer",
    "train",
    "TrainingArguments",
    "sft",
    "dpo",
    "args",
)
"""Where TrainingArguments stand."""
SURE = "per_device_train_batch_size"
"""An argument that no other tool has, by which such a section is known."""
