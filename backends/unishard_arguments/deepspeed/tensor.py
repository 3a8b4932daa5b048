"""Layers over ranks: what the keys of AutoTP say (DeepSpeed 0.19.8, runtime/tensor_parallel/config.py), and how it says
the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config import Config
from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.contract.entries import DocumentValues, Key, KeyEffect, Unreadable
from unishard.contract.field_rows import row, when_default
from unishard.contract.key_rows import drops, integer
from unishard.contract.rules import Fit, Rule, unsupported
from unishard_arguments.deepspeed.facts import TENSOR, cut, dropped, grouped

_BLOCK = "tensor_parallel"
_SAME = "by the plan that the model's class comes with; its own collectives: the same math"
_OWN_PLAN = "cuts by other rules than the model's plan; write them into parallel.tensor.plan"


def _sized(value: Any, document: DocumentValues) -> KeyEffect:
    size = 1 if value in (None, 0) else integer(1)(value)
    if size == 1:
        return dropped("is off")
    return grouped("parallel.tensor.size", size, _SAME, document)


def _planned(value: Any, document: DocumentValues) -> KeyEffect:
    if not value or cut(document) == 1:
        return dropped("is off")
    return KeyEffect(Fit.UNSUPPORTED, _OWN_PLAN)


def _enabled(value: Any, document: DocumentValues) -> KeyEffect:
    return KeyEffect(Fit.IGNORED, "DeepSpeed 0.19.8 refuses enabled here", rejected_upstream=True)


def _inner(value: Any, document: DocumentValues) -> KeyEffect:
    if value not in (1, cut(document)):
        raise Unreadable(f"must be {TENSOR}, got {value}; correct one of them")
    return dropped("repeats the size")


_DROPPED: Mapping[str, str] = {
    "affects only time and memory": "tp_overlap_comm vocab_parallel_lm_head vocab_parallel_ce_backend "
    "keep_module_on_host tp.tp_grain_size tensor_parallel.tp_grain_size",
    "the model's own plan is used": "preset_model",
    "follows from the precision": "dtype",
    "only used for inference": "replace_with_kernel_inject kernel_inject injection_policy_tuple",
}

KEYS: Mapping[str, Key] = {
    TENSOR: Key(_sized, ("parallel.tensor.size",), Fit.EQUIVALENT, _SAME),
    f"{_BLOCK}.enabled": Key(_enabled, (), Fit.IGNORED, "DeepSpeed 0.19.8 refuses enabled here"),
    f"{_BLOCK}.partition_config": Key(_planned, (), Fit.UNSUPPORTED, _OWN_PLAN),
    **dict.fromkeys(
        (f"{_BLOCK}.tp.tp_size", f"{_BLOCK}.tensor_parallel.tp_size"), Key(_inner, (), Fit.IGNORED, "repeats the size")
    ),
    **{f"{_BLOCK}.{name}": drops(why) for why, listed in _DROPPED.items() for name in listed.split()},
}


def _tensor(cfg: Config, topology: Topology) -> Native:
    size = cfg.parallel.tensor.size
    return {_BLOCK: {"autotp_size": size}} if size > 1 else {}


RULES: Mapping[str, Rule] = {
    "parallel.tensor.size": row(
        Fit.EQUIVALENT, TENSOR, f"AutoTP, {_SAME}", when_default("parallel.tensor.size"), to=_tensor
    ),
    "parallel.tensor.plan": row(
        Fit.EQUIVALENT,
        "the model's plan",
        "AutoTP reads it from the model's class",
        when_default("parallel.tensor.plan"),
        unsupported(
            "another plan",
            lambda cfg: cfg.parallel.tensor.plan != "auto",
            "has words of its own for plans, tensor_parallel.partition_config; write it there, or set plan to auto",
        ),
    ),
}
