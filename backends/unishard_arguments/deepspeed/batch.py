"""Batch sizes and the loop: what DeepSpeed's keys say, and how it says the fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config import Config
from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.contract.entries import DocumentValues, Key, KeyEffect, Unreadable
from unishard.contract.field_rows import BUFFERS, exact, row
from unishard.contract.key_rows import integer, number
from unishard.contract.render import AUTO
from unishard.contract.rules import SCRIPT, Fit, Rule, approximate, is_, unless
from unishard_arguments.deepspeed.facts import ARGUMENTS, cut, dropped, quiet, readers, sharing, undecided
from unishard_deepspeed import fields

_TRAIN, _MICRO, _WINDOW = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_MICRO_OF_RANKS = f"{_TRAIN} / ({_WINDOW} x ranks)"
_ABSENT = "is null, as if the key were absent"
_WINDOW_OF_RANKS = f"{_TRAIN} / ({_MICRO} x ranks)"


def assumed(document: DocumentValues) -> dict[str, Any]:
    """What DeepSpeed makes of the sizes that are not there (DeepSpeed 0.19.8, runtime/config.py,
    _set_batch_related_parameters).
    """
    train, micro, window = (quiet(integer(1), document.get(key)) for key in (_TRAIN, _MICRO, _WINDOW))
    ranks = readers(document)
    written = {key for key in (_MICRO, _WINDOW) if document.get(key) is not None}
    defaults: dict[str, Any] = {}
    if _WINDOW not in written and (train or _MICRO in written):
        defaults[_WINDOW] = (
            1 if not train or _MICRO not in written else _quotient(train, micro, ranks) or _WINDOW_OF_RANKS
        )
    if _MICRO not in written and train:
        defaults[_MICRO] = _quotient(train, window or (None if _WINDOW in written else 1), ranks) or _MICRO_OF_RANKS
    return defaults


def _quotient(train: int, factor: int | None, ranks: int | None) -> int | str | None:
    if not factor or not ranks:
        return None
    return train // (factor * ranks) if train % (factor * ranks) == 0 else f"{train} / ({factor} x {ranks})"


def _size(key: str, derived: str, who: str) -> Key:
    field = f"training.{key.removeprefix('train_').removesuffix('_per_gpu')}"

    def read(value: Any, document: DocumentValues) -> KeyEffect:
        value = assumed(document).get(key) if value is None else value
        if value == AUTO:
            return undecided(f"{who} {ARGUMENTS}", field)
        if value == derived:
            return undecided("the number of ranks; add --world-size N", field, by_ranks=True)
        if value is None:
            return dropped(_ABSENT)
        return KeyEffect(fields={field: integer(1)(value)})

    return Key(read, (field,))


def _global(value: Any, document: DocumentValues) -> KeyEffect:
    if value == AUTO:
        return dropped("is the product of the other two and the ranks")
    if value is None:
        return dropped(_ABSENT)
    size = integer(1)(value)
    others = [quiet(integer(1), document.get(key)) for key in (_MICRO, _WINDOW)]
    ranks = readers(document)
    if ranks and all(others) and size != others[0] * others[1] * ranks:
        readers_are = "ranks" if sharing(document) == cut(document) == 1 else "groups of ranks"
        product = f"{others[0]} x {others[1]} x {ranks} {readers_are}"
        raise Unreadable(
            f"must be {_MICRO} x {_WINDOW} x ranks, got {size} for {product}, which DeepSpeed refuses too; correct one"
        )
    return KeyEffect(fields={"training.global_batch_size": size})


def _clipping(value: Any, document: DocumentValues) -> KeyEffect:
    if value == AUTO:
        return undecided(f"max_grad_norm {ARGUMENTS}", "training.gradient_clipping")
    fields = {"training.gradient_clipping": number(0)(value) or None}
    return (
        KeyEffect(fields=fields)
        if "gradient_clipping" in document
        else KeyEffect(note=_CLIPS, fields=fields, notable=True)
    )


_CLIPS = "DeepSpeed clips to 1.0 by default since 0.19.3; earlier versions did not clip"

KEYS: Mapping[str, Key] = {
    _TRAIN: Key(_global, ("training.global_batch_size",)),
    _MICRO: _size(_MICRO, _MICRO_OF_RANKS, "per_device_train_batch_size"),
    _WINDOW: _size(_WINDOW, _WINDOW_OF_RANKS, _WINDOW),
    "gradient_clipping": Key(_clipping, ("training.gradient_clipping",), tool_default=1.0),
}


def _bare(cfg: Config) -> bool:
    return fields.stage_of_strategy(cfg) == 0 and cfg.precision.compute == "fp32"


def _global_of(cfg: Config, topology: Topology) -> Native:
    size = cfg.training.global_batch_size
    return {} if size is None else {_TRAIN: size}


RULES: Mapping[str, Rule] = {
    "training.micro_batch_size": Rule(
        Fit.EXACT,
        _MICRO,
        "the DataLoader of your training script needs the same batch_size",
        lambda cfg, topology: {_MICRO: cfg.training.micro_batch_size},
        auto=True,
    ),
    "training.gradient_accumulation_steps": Rule(
        Fit.EXACT, _WINDOW, to=lambda cfg, topology: {_WINDOW: cfg.training.gradient_accumulation_steps}, auto=True
    ),
    "training.global_batch_size": exact(_TRAIN, to=_global_of),
    "training.gradient_clipping": Rule(
        Fit.EXACT,
        "gradient_clipping",
        "0.0 for null, since DeepSpeed clips to 1.0 when the key is absent",
        lambda cfg, topology: {"gradient_clipping": cfg.training.gradient_clipping or 0.0},
        auto=True,
    ),
    "training.nonfinite": exact(
        "bf16.check_grad_overflow",
        approximate(
            *is_("training.nonfinite", "raise"), "DeepSpeed skips the update without an error; stage 0 in fp32 makes it"
        ),
        approximate(
            "skip with no_shard in fp32",
            lambda cfg: cfg.training.nonfinite == "skip" and _bare(cfg),
            "DeepSpeed makes updates that are not finite at stage 0 in fp32",
        ),
        approximate(
            "ignore but with shard_optimizer or shard_grad_op in bf16",
            lambda cfg: (
                cfg.training.nonfinite == "ignore"
                and not _bare(cfg)
                and not (fields.stage_of_strategy(cfg) in (1, 2) and cfg.precision.compute == "bf16")
            ),
            "DeepSpeed always skips an update that is not finite there",
        ),
        to=lambda cfg, topology: {"bf16": {"check_grad_overflow": cfg.training.nonfinite != "ignore"}},
    ),
    "training.last_window": row(
        Fit.NEEDS_INPUT,
        SCRIPT,
        "drop the micro-batches that do not fill a window",
        unless("gradient_accumulation_steps is 1", lambda cfg: cfg.training.gradient_accumulation_steps == 1),
        approximate(
            *is_("training.last_window", "step"), "DeepSpeed carries an incomplete window over to the next epoch"
        ),
    ),
    "training.buffers": BUFFERS,
    "training.seed": Rule(
        Fit.NEEDS_INPUT, SCRIPT, "torch.manual_seed(seed) before the model is built, and the sampler's seed"
    ),
}
