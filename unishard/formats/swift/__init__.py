"""ms-swift's YAML and JSON: its own arguments and TrainingArguments in one file."""

from __future__ import annotations

from unishard.formats.format import Deferred
from unishard.formats.hf import FORMAT as ARGUMENTS
from unishard.formats.signs import Signs, beside, weighted

__all__ = ["FORMAT"]

_SIGNS = weighted(
    {
        4: "tuner_type train_type sft_type",
        3: "split_dataset_ratio model_id_or_path load_from_cache_file",
        1: "model dataset",
    }
)

FORMAT = Deferred("swift", Signs(_SIGNS, beside(ARGUMENTS.signs, _SIGNS)))
