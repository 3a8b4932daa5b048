"""Entries that Accelerate's readers make themselves, and the blocks of a document."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from unishard.config.describe import shown
from unishard.contract.entries import Entry, KeyEffect, Path, Unreadable
from unishard.contract.rules import Fit

TOOL = "Accelerate 1.15.0"


def dropped(path: Path, value: Any, why: str, *, copy_verbatim: bool = True) -> Entry:
    """An entry that concerns nothing."""
    return Entry(path, value, KeyEffect(Fit.IGNORED, why, copy_verbatim=copy_verbatim))


def refused(path: Path, value: Any, why: str, *, assumed: bool = False) -> Entry:
    """An entry for what is not supported."""
    return Entry(path, value, KeyEffect(Fit.UNSUPPORTED, why), assumed)


def overlooked(path: Path, value: Any, names: Iterable[str]) -> Entry:
    """An entry for a key that Accelerate takes without a word and never looks at."""
    near = get_close_matches(path[-1], names, 1, 0.7)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return Entry(
        path,
        value,
        KeyEffect(Fit.IGNORED, f"{TOOL} does not know this key and ignores it{hint}", copy_verbatim=True, unknown=True),
    )


def block_of(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The mapping below a key; empty where there is none."""
    block = document.get(name)
    return block if isinstance(block, Mapping) else {}


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

NO_WORDS = ("NO", "No", "no", False)
"""What Accelerate takes for `NO`."""

_FORMATS = ("no", "fp16", "bf16", "fp8")


def kind_named(value: Any) -> DistributedType:
    """The kind of this name. YAML 1.1 reads a bare `no` as false, which Accelerate takes for `NO`.

    Raises:
        Unreadable: There is none.
    """
    name = "NO" if value in NO_WORDS else str(value)
    if name not in KINDS:
        near = get_close_matches(name.upper(), KINDS, 1)
        raise Unreadable(
            f"must be one of {', '.join(KINDS)}, got {shown(value)}; write {near[0] if near else 'one of them'}", value
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
    precision = "no" if value is None or value is False else str(value).lower()
    if precision not in _FORMATS:
        raise Unreadable(f"must be one of {', '.join(_FORMATS)}, got {shown(value)}; write one of them", value)
    return precision


def precision_of(document: Mapping[str, Any]) -> str:
    """The format in which a document computes; `no` where it says none that exists."""
    if "mixed_precision" not in document:
        return "fp16" if document.get("fp16") else "no"
    try:
        return precision_word(document["mixed_precision"])
    except Unreadable:
        return "no"
