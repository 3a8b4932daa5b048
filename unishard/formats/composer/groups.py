"""llm-foundry's `optimizer.param_groups` and the config's own groups (llmfoundry/utils/builders.py, 0.22).

Both look for a pattern anywhere in a parameter's name, and the first group with one that matches takes the parameter.
Composer's decay is that of the group's own learning rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config.describe import shown
from unishard.config.nested import Native
from unishard.contract.entries import DocumentValues, KeyEffect, Unreadable
from unishard.contract.key_rows import number, text
from unishard.contract.rules import Fit

__all__ = ["read"]

_KNOWN = ("param_str_match", "lr", "weight_decay")


def read(value: Any, given: DocumentValues) -> KeyEffect:
    """What the groups say."""
    if value in (None, []):
        return KeyEffect(Fit.IGNORED, "is empty")
    if not isinstance(value, list):
        raise Unreadable(
            f"must be a list of groups, got {shown(value)}; write [{{param_str_match: norm, weight_decay: 0.0}}]"
        )
    groups = [_group(item, given) for item in value]
    return KeyEffect(fields={"optimizer.groups": groups})


def _group(item: Any, given: DocumentValues) -> Native:
    if not isinstance(item, Mapping) or "param_str_match" not in item:
        raise Unreadable(
            f"must have param_str_match, got {shown(item)}; write {{param_str_match: norm, weight_decay: 0.0}}"
        )
    unknown = next((key for key in item if key not in _KNOWN), None)
    if unknown is not None:
        raise Unreadable(f"takes only lr and weight_decay, got {unknown}; remove it")
    if len(item) == 1:
        raise Unreadable(f"must have an lr or a weight_decay, got {shown(item)}; write one of them")
    group: Native = {"params": [text(item["param_str_match"])]}
    rate = number(0)(item.get("lr", given.get("optimizer.lr")))
    decay = number(0)(item.get("weight_decay", given.get("optimizer.weight_decay") or 0.0))
    if "lr" in item:
        group["lr"] = rate
    if "weight_decay" in item or "lr" in item:
        group["weight_decay"] = _divided(decay, rate, given)
    return group


def _divided(decay: float, rate: float, given: DocumentValues) -> float:
    if not decay or not str(given.get("optimizer.name")).lower().startswith("decoupled_"):
        return decay
    if not rate:
        raise Unreadable("must have weight_decay 0 if lr is 0; write 0")
    return decay / rate
