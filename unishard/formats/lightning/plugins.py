"""The Trainer's `plugins`: those that stand for a word of `precision`, and those of the launch and of files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unishard.config.describe import shown
from unishard.contract.entries import DocumentValues, KeyEffect, left_out
from unishard.contract.key_rows import integer, number
from unishard.contract.rules import Fit
from unishard.formats.lightning.built import built, short
from unishard.formats.lightning.strategies import names_strategy

_PRECISIONS = ("FSDPPrecision", "MixedPrecision", "DeepSpeedPrecision", "HalfPrecision")


def plugins(value: Any, document: DocumentValues) -> KeyEffect:
    """What they say."""
    items: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
    fields: dict[str, Any] = {}
    formats = False
    for item in items:
        plugin = built(item)
        name = short(plugin.path) if plugin else shown(item)
        if plugin and name in _PRECISIONS:
            fields |= _scaler(plugin.arguments)
            formats = True
        elif names_strategy(name):
            return KeyEffect(Fit.UNSUPPORTED, f"Lightning 2 no longer takes {name} as a plugin; write it as strategy")
        elif not name.endswith(("Environment", "CheckpointIO")):
            return KeyEffect(Fit.UNSUPPORTED, f"{name} changes how Lightning computes; write precision instead")
    if fields or formats:
        return KeyEffect(fields=fields)
    return left_out("affects only the launch and files")


def _scaler(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The loss scale of a plugin's `GradScaler`."""
    scaler = built(arguments.get("scaler"))
    if scaler is None:
        return {}
    convertible = {
        "precision.initial_loss_scale": ("init_scale", number(1e-30)),
        "precision.loss_scale_growth_interval": ("growth_interval", integer(1)),
    }
    return {
        field: convert(scaler.arguments[key])
        for field, (key, convert) in convertible.items()
        if key in scaler.arguments
    }


def precision_in(value: Any) -> Mapping[str, Any]:
    """The word of `precision` that a plugin stands for, as a default of the Trainer's; nothing where none does."""
    for item in value if isinstance(value, list | tuple) else [value]:
        plugin = built(item)
        if plugin and short(plugin.path) in _PRECISIONS and isinstance(plugin.arguments.get("precision"), str):
            return {"precision": plugin.arguments["precision"]}
    return {}
