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
"""Ranks that share each sample, and groups of those."""
LEAST_STAGE = {"param": 3, "optimizer": 1}
"""The stage of ZeRO from which on DeepSpeed offloads parameters, and an optimizer."""


def quiet(convert: Callable[[Any], Any], value: Any, otherwise: Any = None) -> Any:
    """The value, or another where it cannot be read; the key that holds it says so itself."""
    try:
        return convert(value)
    except Unreadable:
        return otherwise


def sharing(given: DocumentValues) -> int:
    """How many ranks share each sample."""
    return int(quiet(integer(1), given.get(SHARING), 1))


def readers(given: DocumentValues) -> int | None:
    """How many ranks or groups of them read samples of their own; None where it is not known."""
    return given.topology.world_size // sharing(given) if given.topology else None


def dropped(note: str) -> KeyEffect:
    """Nothing is lost without the key; it is repeated where a DeepSpeed config is written again."""
    return left_out(note)


def undecided(who: str, *paths: str) -> KeyEffect:
    """Only the training script knows the value of these fields."""
    return KeyEffect(Fit.NEEDS_INPUT, f"the value comes from {who}", dict.fromkeys(paths, Undecided(who)))


def only(key: Key, holds: Callable[[DocumentValues], bool], otherwise: str) -> Key:
    """A row for a key that DeepSpeed reads in some cases only.

    Args:
        key: Its row in those.
        holds: Whether it is one of them.
        otherwise: Why nothing is lost in the others.
    """
    return key._replace(read=lambda value, given: key.read(value, given) if holds(given) else dropped(otherwise))


def unless_auto(key: Key, otherwise: str) -> Key:
    """A row for a key whose `"auto"` concerns time and memory alone."""
    return key._replace(read=lambda value, given: dropped(otherwise) if value == AUTO else key.read(value, given))


def spelt(key: Key, name: str, *, rejected_upstream: bool = False) -> Key:
    """A row for another spelling of a key, which is not repeated beside the one that is written (DeepSpeed refuses
    both).

    Args:
        key: The row of the key.
        name: The key.
        rejected_upstream: Whether DeepSpeed no longer takes the other spelling.
    """

    def read(value: Any, given: DocumentValues) -> KeyEffect:
        return key.read(value, given)._replace(copy_verbatim=False, rejected_upstream=rejected_upstream)

    return key._replace(read=read, note=f"another spelling of {name}")


def stage(given: DocumentValues) -> int:
    """ZeRO's stage; 0 where the config has none, as DeepSpeed assumes, and 2 for `auto`, as Accelerate does
    (utils/dataclasses.py).
    """
    block = given.get("zero_optimization")
    if isinstance(block, bool | int | str):
        return int(quiet(boolean, block, block if isinstance(block, int) and block in range(4) else False))
    said = given.get("zero_optimization.stage")
    return 2 if said == AUTO else int(quiet(integer(0, 3), said, 0))


def may_reach(given: DocumentValues, least: int) -> bool:
    """Whether the stage is this one or a later one, or still to be decided."""
    return stage(given) >= least or given.get("zero_optimization.stage") == AUTO


def device(given: DocumentValues, what: str) -> str:
    """Where `param` or `optimizer` live: `none`, `cpu` or `nvme`; `auto` if that is still to be decided."""
    if not may_reach(given, LEAST_STAGE[what]):
        return "none"
    old = {"param": ("cpu_offload_param", "cpu_offload_params"), "optimizer": ("cpu_offload",)}[what]
    if any(quiet(boolean, given.get(f"zero_optimization.{name}"), False) for name in old):
        return "cpu"
    word = given.get(f"zero_optimization.offload_{what}.device")
    return str(word).lower() if str(word).lower() in ("cpu", "nvme", AUTO) else "none"


def _switches(given: DocumentValues) -> dict[str, Any]:
    """What `enabled` of each 16-bit block says."""
    bf16 = given.get("bf16.enabled")
    return {"bf16": given.get("bfloat16.enabled") if bf16 is None else bf16, "fp16": given.get("fp16.enabled")}


def compute(given: DocumentValues) -> str | Undecided:
    """Format of parameters and activations."""
    said = _switches(given)
    on = [name for name, value in said.items() if quiet(boolean, value, False)]
    if on:
        return on[0]
    if quiet(boolean, given.get("torch_autocast.enabled"), False):
        return str(quiet(dtype, given.get("torch_autocast.dtype"), "bf16"))
    open_ = [name for name, value in said.items() if value == AUTO]
    return Undecided(f"{' and '.join(open_)} {ARGUMENTS}") if open_ else "fp32"


def may_compute(given: DocumentValues, name: str) -> bool:
    """Whether the model computes in this format, or it is still to be decided whether."""
    found = compute(given)
    return _switches(given).get(name) == AUTO if isinstance(found, Undecided) else found == name
