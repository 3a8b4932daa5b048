"""Every argument of TrainingArguments (transformers 5.23, training_args.py), those of older versions, and what each
says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config.describe import shown
from unishard.contract.entries import DocumentValues, Key, KeyEffect, Unreadable, left_out
from unishard.contract.key_rows import degree, listed, refuses
from unishard.contract.rules import Fit
from unishard.formats.hf.loop import LOOP, SPLIT, off
from unishard.formats.hf.optimizing import OPTIMIZER
from unishard.formats.hf.saving import SAVED
from unishard.formats.hf.scheduling import SCHEDULE
from unishard.formats.hf.sequence import KEYS as SEQUENCE
from unishard.formats.names import ignored

_FILES = "affects only checkpoints"
_DATA = "concerns the DataLoader, which the training script builds"


def _prefetched(value: Any, document: DocumentValues) -> KeyEffect:
    if value is not None and not document.get("dataloader_num_workers"):
        raise Unreadable(f"must be null without dataloader_num_workers, got {shown(value)}; remove it", value)
    return left_out(_DATA)


def _best(value: Any, document: DocumentValues) -> KeyEffect:
    evaluated, saved = (
        document.get("eval_strategy") or document.get("evaluation_strategy") or "no",
        document.get("save_strategy") or "steps",
    )
    if value and saved not in ("best", evaluated):
        strategies = f"eval_strategy ({evaluated}) and save_strategy ({saved})"
        raise Unreadable(f"must be false where {strategies} differ, got {shown(value)}; make the two equal", value)
    return left_out(_FILES)


_OLDER = {**ignored("hf/ignored_older.txt", off=off), "split_batches": refuses(SPLIT, off)}
IGNORED: Mapping[str, Key] = {
    **ignored("hf/ignored.txt", off=off),
    **_OLDER,
    "load_best_model_at_end": Key(_best, (), Fit.IGNORED, _FILES),
    "dataloader_prefetch_factor": Key(_prefetched, (), Fit.IGNORED, _DATA),
    "tp_size": degree("parallel.tensor.size", "by the plan of the model's class: the same math"),
}

ENGINES = ("fsdp", "fsdp_config", "deepspeed")
"""Arguments that hold an engine's own: read by `sharding` and `zero`, since one of them says many things."""


def _engine(name: str) -> Key:
    def read(value: Any, document: DocumentValues) -> KeyEffect:
        return KeyEffect(Fit.IGNORED, "is off") if off(value) else KeyEffect(fields={"backend": name})

    return Key(read, ("backend",), note=f"its keys are those of {name}")


def _classes(value: Any, document: DocumentValues) -> KeyEffect:
    """Once an argument beside `fsdp`."""
    if off(value) or off(document.get("fsdp")):
        return left_out("only used when fsdp is enabled")
    return KeyEffect(Fit.EXACT, "transformers 5 reads it in fsdp_config", {"sharding.units": listed(value)})


def _least(value: Any, document: DocumentValues) -> KeyEffect:
    if off(value) or off(document.get("fsdp")):
        return left_out("is off")
    note = "transformers 5 reads it in fsdp_config, for SIZE_BASED_WRAP; write it there"
    return KeyEffect(Fit.UNSUPPORTED, note)


RENAMED: Mapping[str, str] = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
    "warmup_ratio": "warmup_steps",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
}
"""Older names of arguments, and today's."""
OLDER = {
    *_OLDER,
    *RENAMED,
    "adafactor",
    "split_batches",
    "fsdp_min_num_params",
    "fsdp_transformer_layer_cls_to_wrap",
    "tp_size",
}
"""What transformers 5.24 has no longer, what other scripts than Trainer's take, and objects that no file holds."""


def _trainers(row: Key) -> Key:
    """The row of an argument, which Trainer takes also where unishard has nothing like it."""

    def read(value: Any, document: DocumentValues) -> KeyEffect:
        effect = row.read(value, document)
        return effect._replace(copy_verbatim=True) if effect.fit is Fit.UNSUPPORTED else effect

    return row._replace(read=read)


_ROWS: Mapping[str, Key] = {
    **LOOP,
    **OPTIMIZER,
    **SCHEDULE,
    **SAVED,
    **SEQUENCE,
    "fsdp": _engine("fsdp"),
    "fsdp_config": _engine("fsdp"),
    "deepspeed": _engine("deepspeed"),
    "fsdp_transformer_layer_cls_to_wrap": Key(
        _classes, ("sharding.units",), note="transformers 5 reads it in fsdp_config"
    ),
    "fsdp_min_num_params": Key(_least, (), Fit.UNSUPPORTED, "transformers 5 reads it in fsdp_config"),
    **IGNORED,
}
KEYS: Mapping[str, Key] = {name: row if name in OLDER else _trainers(row) for name, row in _ROWS.items()}
"""The arguments and what each says."""
