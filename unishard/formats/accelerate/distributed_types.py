"""What Accelerate's `distributed_type` and `mixed_precision` can be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from unishard.config.describe import shown
from unishard.contract.entries import Unreadable
from unishard.contract.rules import Fit

__all__ = ["KINDS", "DistributedType", "kind_named", "kind_of", "precision_of", "precision_word"]


@dataclass(frozen=True, slots=True)
class DistributedType:
    """One way in which Accelerate trains."""

    engine: str
    """Whose arguments the file holds: `fsdp`, `deepspeed`, or `none` for replicas."""
    effect: str
    """In words, for MAPPING.md."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    fit: Fit = Fit.EXACT
    note: str = ""


_REPLICAS = DistributedType(
    "none", "replicas (DistributedDataParallel)", {"backend": "fsdp", "sharding.strategy": "no_shard"}
)

KINDS: Mapping[str, DistributedType] = {
    "FSDP": DistributedType("fsdp", "backend fsdp", {"backend": "fsdp"}),
    "DEEPSPEED": DistributedType("deepspeed", "backend deepspeed", {"backend": "deepspeed"}),
    "MULTI_GPU": _REPLICAS,
    "NO": DistributedType("none", "one process", {"backend": "fsdp", "sharding.strategy": "no_shard"}),
    **{f"MULTI_{device}": _REPLICAS for device in ("CPU", "XPU", "NPU", "MLU", "SDAA", "MUSA", "HPU", "NEURON")},
    "XLA": DistributedType(
        "none", "refused", fit=Fit.UNSUPPORTED, note="training on TPUs is not supported; write FSDP, for GPUs"
    ),
    "MEGATRON_LM": DistributedType(
        "none",
        "refused",
        fit=Fit.UNSUPPORTED,
        note="Megatron-LM's tensor and pipeline parallelism has no equivalent; write FSDP",
    ),
}
"""By the word in `distributed_type`."""

_FORMATS = ("no", "fp16", "bf16", "fp8")


def kind_named(value: Any) -> DistributedType:
    """The kind of this name. YAML 1.1 reads a bare `NO` as false, which Accelerate takes for it.

    Raises:
        Unreadable: There is none.
    """
    name = "NO" if value is False else str(value)
    if name not in KINDS:
        near = get_close_matches(name.upper(), KINDS, 1)
        raise Unreadable(
            f"must be one of {', '.join(KINDS)}, got {shown(value)}; write {near[0] if near else 'one of them'}"
        )
    return KINDS[name]


def kind_of(document: Mapping[str, Any]) -> DistributedType:
    """The kind of a document; where it does not say a valid one, that whose arguments it holds."""
    try:
        return kind_named(document.get("distributed_type"))
    except Unreadable:
        held = next((kind for kind in ("FSDP", "DEEPSPEED") if document.get(f"{kind.lower()}_config")), "NO")
        return KINDS[held]


def precision_word(value: Any) -> str:
    """`no`, `fp16`, `bf16` or `fp8`. YAML 1.1 reads a bare `no` as false, at which Accelerate fails.

    Raises:
        Unreadable: It is something else.
    """
    word = "no" if value is None or value is False else str(value).lower()
    if word not in _FORMATS:
        raise Unreadable(f"must be one of {', '.join(_FORMATS)}, got {shown(value)}; write one of them")
    return word


def precision_of(document: Mapping[str, Any]) -> str:
    """The format in which a document computes; `no` where it says none that exists."""
    if "mixed_precision" not in document:
        return "fp16" if document.get("fp16") else "no"
    try:
        return precision_word(document["mixed_precision"])
    except Unreadable:
        return "no"
