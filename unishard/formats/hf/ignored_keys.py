"""TrainingArguments that a config of the training does not need, in groups (transformers 5.23, training_args.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config.describe import shown
from unishard.contract.entries import DocumentValues, Key, KeyEffect, Unreadable, left_out
from unishard.contract.key_rows import refuses
from unishard.contract.rules import Fit
from unishard.formats.hf.loop import off
from unishard.formats.names import ignored

__all__ = ["IGNORED"]

_NOISE = "adds noise to the embeddings; add it in the training script with a forward hook"
_SMOOTHING = "changes the loss, which the training script computes; smooth the labels there"

_FILES = "affects only checkpoints"
_DATA = "concerns the DataLoader, which the training script builds"


def _prefetched(value: Any, given: DocumentValues) -> KeyEffect:
    if value is not None and not given.get("dataloader_num_workers"):
        raise Unreadable(f"must be null without dataloader_num_workers, got {shown(value)}; remove it")
    return left_out(_DATA)


def _best(value: Any, given: DocumentValues) -> KeyEffect:
    evaluated, saved = (
        given.get("eval_strategy") or given.get("evaluation_strategy") or "no",
        given.get("save_strategy") or "steps",
    )
    if value and saved not in ("best", evaluated):
        strategies = f"eval_strategy ({evaluated}) and save_strategy ({saved})"
        raise Unreadable(f"must be false where {strategies} differ, got {shown(value)}; make the two equal")
    return left_out(_FILES)


IGNORED: Mapping[str, Key] = {
    **ignored("hf/ignored.txt"),
    "load_best_model_at_end": Key(_best, "", Fit.IGNORED, _FILES),
    "dataloader_prefetch_factor": Key(_prefetched, "", Fit.IGNORED, _DATA),
    "label_smoothing_factor": refuses(_SMOOTHING, off),
    "neftune_noise_alpha": refuses(_NOISE, off),
    "sharded_ddp": refuses("transformers removed fairscale's sharded DDP; write fsdp: true", off),
    "torchdynamo": refuses("transformers calls it torch_compile_backend now; write that", off),
    "tp_size": refuses("tensor parallelism is not supported; remove it", lambda value: off(value) or value == 1),
}
