"""What a DeepSpeed config comes to as a whole, for keys whose meaning depends on others, and rows that depend on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unishard.contract.entries import DocumentValues, Key, KeyEffect, Undecided, Unreadable, left_out
from unishard.contract.key_rows import boolean, integer
from unishard.contract.render import AUTO
from unishard.contract.rules import Fit
from unishard_deepspeed.keys.values import dtype

ARGUMENTS = "of the TrainingArguments"
SHARING, DATA_SIZE = "sequence_parallel_size", "data_parallel_size"
TENSOR = "tensor_parallel.autotp_size"
"""Ranks that share each sample, and groups of those."""
LEAST_STAGE = {"param": 3, "optimizer": 1}
"""The stage of ZeRO from which on DeepSpeed offloads parameters, and an optimizer."""


def quiet(convert: Callable[[Any], Any], value: Any, otherwise: Any = None) -> Any:
    """The value, or another where it cannot be read; the key that holds it says so itself."""
    try:
        return convert(value)
    except Unreadable:
        return otherwise


def sharing(document: DocumentValues) -> int:
    """How many ranks share each sequence."""
    return int(quiet(integer(1), document.get(SHARING), 1))


def cut(document: DocumentValues) -> int:
    """How many ranks have layers together."""
    return int(quiet(integer(1), document.get(TENSOR), 1))


def readers(document: DocumentValues) -> int | None:
    """How many ranks or groups of them read samples of their own; None where it is not known."""
    together = sharing(document) * cut(document)
    return document.topology.world_size // together if document.topology else None


def grouped(field: str, size: int, note: str, document: DocumentValues) -> KeyEffect:
    """A field whose value is so many ranks, which must divide all."""
    ranks = document.topology.world_size if document.topology else size
    if ranks > 1 and ranks % size:
        raise Unreadable(f"must divide the {ranks} ranks, got {size}; write a size that does")
    return KeyEffect(Fit.EQUIVALENT, note, {field: size})


def dropped(note: str) -> KeyEffect:
    """Nothing is lost without the key; it is repeated where a DeepSpeed config is written again."""
    return left_out(note)


def undecided(who: str, *paths: str, by_ranks: bool = False) -> KeyEffect:
    """Only the training script, or the number of ranks, knows the value of these fields."""
    value = Undecided(who, by_ranks=by_ranks)
    return KeyEffect(Fit.NEEDS_INPUT, f"the value comes from {who}", dict.fromkeys(paths, value))


def only(key: Key, holds: Callable[[DocumentValues], bool], otherwise: str) -> Key:
    """A row for a key that DeepSpeed reads in some cases only.

    Args:
        key: Its row in those.
        holds: Whether it is one of them.
        otherwise: Why nothing is lost in the others.
    """
    return key._replace(
        read=lambda value, document: key.read(value, document) if holds(document) else dropped(otherwise)
    )


def unless_auto(key: Key, otherwise: str) -> Key:
    """A row for a key whose `"auto"` concerns time and memory alone."""
    return key._replace(read=lambda value, document: dropped(otherwise) if value == AUTO else key.read(value, document))


def spelt(key: Key, name: str, *, rejected_upstream: bool = False) -> Key:
    """A row for another spelling of a key, which is not repeated beside the one that is written (DeepSpeed refuses
    both).

    Args:
        key: The row of the key.
        name: The key.
        rejected_upstream: Whether DeepSpeed no longer takes the other spelling.
    """

    def read(value: Any, document: DocumentValues) -> KeyEffect:
        return key.read(value, document)._replace(copy_verbatim=False, rejected_upstream=rejected_upstream)

    return key._replace(read=read, note=f"another spelling of {name}")


def stage(document: DocumentValues) -> int:
    """ZeRO's stage; 0 where the config has none, as DeepSpeed assumes, and 2 for `auto`, as Accelerate does
    (utils/dataclasses.py).
    """
    block = document.get("zero_optimization")
    if isinstance(block, bool | int | str):
        return int(quiet(boolean, block, block if isinstance(block, int) and block in range(4) else False))
    stage_value = document.get("zero_optimization.stage")
    return 2 if stage_value == AUTO else int(quiet(integer(0, 3), stage_value, 0))


def may_reach(document: DocumentValues, least: int) -> bool:
    """Whether the stage is this one or a later one, or still to be decided."""
    return stage(document) >= least or document.get("zero_optimization.stage") == AUTO


def device(document: DocumentValues, state: str) -> str:
    """Where `param` or `optimizer` live: `none`, `cpu` or `nvme`; `auto` if that is still to be decided."""
    if not may_reach(document, LEAST_STAGE[state]):
        return "none"
    old = {"param": ("cpu_offload_param", "cpu_offload_params"), "optimizer": ("cpu_offload",)}[state]
    if any(quiet(boolean, document.get(f"zero_optimization.{name}"), False) for name in old):
        return "cpu"
    device_name = document.get(f"zero_optimization.offload_{state}.device")
    return str(device_name).lower() if str(device_name).lower() in ("cpu", "nvme", AUTO) else "none"


def _switches(document: DocumentValues) -> dict[str, Any]:
    """What `enabled` of each 16-bit block says."""
    bf16 = document.get("bf16.enabled")
    return {"bf16": document.get("bfloat16.enabled") if bf16 is None else bf16, "fp16": document.get("fp16.enabled")}


def compute(document: DocumentValues) -> str | Undecided:
    """Format of parameters and activations."""
    switches = _switches(document)
    on = [name for name, value in switches.items() if quiet(boolean, value, False)]
    if on:
        return on[0]
    if quiet(boolean, document.get("torch_autocast.enabled"), False):
        return autocast_dtype(document)
    open_ = [name for name, value in switches.items() if value == AUTO]
    return Undecided(f"{' and '.join(open_)} {ARGUMENTS}") if open_ else "fp32"


def autocast_dtype(document: DocumentValues) -> str:
    """Format in which `torch_autocast` computes: without a dtype that of torch, which is fp16 on CUDA."""
    value = document.get("torch_autocast.dtype")
    return "fp16" if value is None else str(quiet(dtype, value, "bf16"))


def may_compute(document: DocumentValues, name: str) -> bool:
    """Whether the model computes in this format, or it is still to be decided whether."""
    dtype_name = compute(document)
    return _switches(document).get(name) == AUTO if isinstance(dtype_name, Undecided) else dtype_name == name
