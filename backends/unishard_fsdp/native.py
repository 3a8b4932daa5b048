"""Validate `native: {fsdp: ...}`, the user's settings that are merged last into the native config. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from unishard.config import Config
from unishard.config.describe import expected, shown
from unishard.config.nested import Native, flat, merge, nested
from unishard.contract.rules import Fit
from unishard.errors import ConfigError, Problem
from unishard_fsdp.options import FORMS

DECIDED: Mapping[str, str] = {
    "data_parallel": "sharding.strategy and precision.compute",
    "mesh": "sharding.strategy and sharding.group_size",
    "mesh.replicate": "sharding.strategy and sharding.group_size",
    "mesh.shard": "sharding.strategy and sharding.group_size",
    "units": "sharding.units",
    "min_unit_params": "sharding.min_unit_params",
    "conditional_modules": "sharding.conditional_modules",
    "reshard_after_forward": "sharding.reshard_after_forward",
    "keep_last_unit": "sharding.reshard_after_forward and communication.prefetch_bucket_size",
    "mp_policy.param_dtype": "precision.compute",
    "mp_policy.reduce_dtype": "precision.reduce",
    "mp_policy.cast_forward_inputs": "precision.cast_inputs",
    "offload_policy": "offload.params and offload.optimizer",
    "offload_policy.pin_memory": "offload.pin_memory",
    "host_optimizer": "offload.params and offload.optimizer",
    "host_optimizer.pin_memory": "offload.pin_memory",
    "prefetch_numel": "communication.prefetch_bucket_size",
    "bucket_cap_mb": "communication.reduce_bucket_size",
}
"""Native keys that a config field sets, and that field."""

SAME_MATHS = frozenset(
    {
        "requires_gradient_sync",
        "requires_all_reduce",
        "reshard_after_backward",
        "unshard_embeddings_in_backward",
        "find_unused_parameters",
        "static_graph",
        "gradient_as_bucket_view",
        "separate_reduce_scatter_group",
        "allocate_memory_from_process_group_for_comm",
        "symm_mem_for_comm",
    }
)
"""Keys that affect only time, memory or collectives; any other may change the maths."""

_ACCUMULATES = ("requires_gradient_sync", "requires_all_reduce")
_ALLOCATED, _SYMMETRIC = "allocate_memory_from_process_group_for_comm", "symm_mem_for_comm"


def check(cfg: Config, written: Native) -> dict[str, Any]:
    """Validate the user's settings, and return them by dotted key.

    Args:
        cfg: The config; its `native.fsdp` is checked.
        written: The native config from the fields.

    Raises:
        ConfigError: All problems at once, at `native.fsdp.<key>`.
    """
    overrides = dict(flat(cfg.native.get("fsdp", {})))
    form = written["data_parallel"]
    problems = [
        Problem(f"native.fsdp.{key}", text)
        for key, value in overrides.items()
        if (text := _refusal(key, value, written, cfg))
    ]
    if problems:
        raise ConfigError(problems)
    try:
        FORMS[form].model_validate(merge(written, nested(overrides)))
    except ValidationError as error:
        raise ConfigError([_misfit(form, problem["loc"], problem["input"]) for problem in error.errors()]) from None
    return overrides


def fit(key: str, value: Any, written: Native) -> tuple[Fit, str]:
    """The fit and the note of a checked key.

    Args:
        key: Dotted.
        value: The user's value.
        written: The native config that the fields decide.
    """
    reduced = written.get("mp_policy", {}).get("reduce_dtype")
    if key in _ACCUMULATES and value == "last_micro_batch" and reduced not in (None, "float32"):
        return (
            Fit.APPROXIMATE,
            f"FSDP2 accumulates unreduced gradients in the reduce dtype, here {reduced} (torch 2.13)",
        )
    if key in SAME_MATHS:
        return Fit.EQUIVALENT, "affects only time, memory or collectives"
    return Fit.APPROXIMATE, "only PyTorch has this setting; another backend trains without it"


def _refusal(key: str, value: Any, written: Native, cfg: Config) -> str | None:
    """Why a key may not be set, and what to do instead."""
    form = written["data_parallel"]
    if key in DECIDED:
        return f"is decided by {DECIDED[key]}; set it there"
    if key == "requires_all_reduce" and written.get(key) is None and key in _keys(form):
        return "is only for hybrid strategies; set sharding.strategy to hybrid_shard or remove it"
    if key == _SYMMETRIC and value is True and cfg.native.get("fsdp", {}).get(_ALLOCATED) is True:
        return f"cannot be on with {_ALLOCATED}: each says where buffers come from; remove one of the two"
    if key in _keys(form):
        return None
    others = [other for other in FORMS if key in _keys(other)]
    if others:
        return f"belongs to {' and '.join(others)}, but this strategy and precision use {form}; remove it"
    free = [name for name in _keys(form) if name not in DECIDED]
    near = get_close_matches(key, [*free, *DECIDED], 1)
    return f"unknown key; did you mean {near[0]!r}?" if near else f"unknown key; {form} takes {', '.join(free)}"


def _keys(form: str) -> dict[str, FieldInfo]:
    """The fields of a form by dotted key, including those of sections."""
    keys: dict[str, FieldInfo] = {}
    for name, field in FORMS[form].model_fields.items():
        sections = [
            kind
            for kind in (field.annotation, *get_args(field.annotation))
            if isinstance(kind, type) and issubclass(kind, BaseModel)
        ]
        inner = [(f"{name}.{leaf}", below) for section in sections for leaf, below in section.model_fields.items()]
        keys.update(inner or [(name, field)])
    return keys


def _misfit(form: str, where: tuple[int | str, ...], value: Any) -> Problem:
    keys = _keys(form)
    key = next(
        (".".join(map(str, where[:length])) for length in (2, 1) if ".".join(map(str, where[:length])) in keys),
        str(where[0]),
    )
    wanted = (
        expected(keys[key])
        if key in keys
        else f"a mapping with {', '.join(name for name in keys if name.startswith(f'{key}.'))}"
    )
    return Problem(f"native.fsdp.{key}", f"is {shown(value)}; write {wanted}")
