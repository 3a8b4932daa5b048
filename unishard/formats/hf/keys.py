"""Every argument of TrainingArguments (transformers 5.23, training_args.py), those of older versions, and what each
says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.contract.entries import DocumentValues, Key, KeyEffect, left_out
from unishard.contract.key_rows import listed
from unishard.contract.rules import Fit
from unishard.formats.hf.ignored_keys import IGNORED
from unishard.formats.hf.loop import LOOP, off
from unishard.formats.hf.optimizing import OPTIMIZER
from unishard.formats.hf.saving import SAVED
from unishard.formats.hf.scheduling import SCHEDULE

__all__ = ["ENGINES", "KEYS"]

ENGINES = ("fsdp", "fsdp_config", "deepspeed")
"""Arguments that hold an engine's own: read by `sharding` and `zero`, since one of them says many things."""


def _engine(name: str) -> Key:
    def read(value: Any, given: DocumentValues) -> KeyEffect:
        return KeyEffect(Fit.IGNORED, "is off") if off(value) else KeyEffect(fields={"backend": name})

    return Key(read, "backend", note=f"its keys are those of {name}")


def _classes(value: Any, given: DocumentValues) -> KeyEffect:
    """Once an argument beside `fsdp`."""
    if off(value) or off(given.get("fsdp")):
        return left_out("only used when fsdp is enabled")
    return KeyEffect(Fit.EXACT, "transformers 5 reads it in fsdp_config", {"sharding.units": listed(value)})


def _least(value: Any, given: DocumentValues) -> KeyEffect:
    if off(value) or off(given.get("fsdp")):
        return left_out("is off")
    note = "transformers 5 reads it in fsdp_config, for SIZE_BASED_WRAP; write it there"
    return KeyEffect(Fit.UNSUPPORTED, note)


KEYS: Mapping[str, Key] = {
    **LOOP,
    **OPTIMIZER,
    **SCHEDULE,
    **SAVED,
    "fsdp": _engine("fsdp"),
    "fsdp_config": _engine("fsdp"),
    "deepspeed": _engine("deepspeed"),
    "fsdp_transformer_layer_cls_to_wrap": Key(
        _classes, "sharding.units", note="transformers 5 reads it in fsdp_config"
    ),
    "fsdp_min_num_params": Key(_least, "", Fit.UNSUPPORTED, "transformers 5 reads it in fsdp_config"),
    **IGNORED,
}
"""The arguments and what each says."""
