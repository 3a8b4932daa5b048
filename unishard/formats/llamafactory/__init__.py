"""LLaMA-Factory's YAML: its own arguments and TrainingArguments in one file."""

from __future__ import annotations

from unishard.formats.format import Deferred
from unishard.formats.hf import FORMAT as ARGUMENTS
from unishard.formats.markers import Markers, beside, weighted

__all__ = ["FORMAT"]

_MARKERS = weighted(
    {
        4: "finetuning_type cutoff_len neat_packing dataset_dir plot_loss freeze_trainable_layers",
        1: "template stage",
    }
)

FORMAT = Deferred("llamafactory", Markers(_MARKERS, beside(ARGUMENTS.markers, _MARKERS)))
