"""Composer's batch sizes: the whole batch is given, and micro-batches are cut from each rank's part of it (llm-foundry
0.22).
"""

from __future__ import annotations

import math
import re
from typing import Any

from unishard.config.describe import shown
from unishard.contract.entries import DocumentValues, Key, KeyEffect, Undecided, Unreadable
from unishard.contract.key_rows import integer
from unishard.contract.render import AUTO
from unishard.contract.rules import Fit

_TIME = re.compile(r"\s*(\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*(ba|ep|dur|tok|sp|sec|iter)\s*")
_UNITS = {
    "ep": "the length of the data: {text} are epochs",
    "tok": "the tokens in a batch: {text} are tokens",
    "sp": "the batch size: {text} are samples",
    "sec": "the speed of the training: {text} are seconds",
    "iter": "the length of an iteration: {text} are iterations",
}


def updates(value: Any, given: DocumentValues) -> int | Undecided:
    """A time in updates; undecided where the data decides it.

    Raises:
        Unreadable: It is no time.
    """
    found = _TIME.fullmatch(value) if isinstance(value, str) else None
    if isinstance(value, int) and not isinstance(value, bool):
        # Composer takes a bare number for epochs.
        return Undecided(_UNITS["ep"].format(text=value))
    if not found:
        raise Unreadable(f"must be a time, got {shown(value)}; write one such as 100ba for 100 updates")
    amount, unit = float(found.group(1)), found.group(2)
    if unit == "ba":
        return int(amount)
    if unit == "dur":
        whole = given.get("max_duration")
        if whole is None:
            return Undecided(f"max_duration, which the file does not have: {value} is a fraction of it")
        if str(whole).strip().endswith("dur"):
            raise Unreadable(f"must be in batches if max_duration is a fraction, got {shown(value)}; write 100ba")
        total = updates(whole, given)
        return total if isinstance(total, Undecided) else int(amount * total)
    if unit == "sp" and (batch := _global_batch_size(given)):
        return math.ceil(amount / batch)
    return Undecided(_UNITS[unit].format(text=value))


_AUTOMATIC = Undecided("Composer's automatic micro-batching, which takes what fits into memory; write a size")
_RANKS = Undecided("the number of ranks: global batch / (micro-batch x ranks); add --world-size")


def _size(given: DocumentValues, *keys: str) -> int | Undecided | None:
    """The first of these sizes that is said; None where none is."""
    for key in keys:
        value = given.get(key)
        if value is not None and not (isinstance(value, str) and "${" in value):
            return _AUTOMATIC if value == AUTO else int(integer(1)(value))
    return None


def _global_batch_size(given: DocumentValues) -> int | None:
    """Samples in one update over all ranks."""
    found = _size(given, "global_train_batch_size", "train_batch_size")
    if isinstance(found, int):
        return found
    each = _size(given, "device_train_batch_size")
    return each * given.topology.world_size if isinstance(each, int) and given.topology else None


def _part(given: DocumentValues) -> int | None:
    """Samples in one update of one rank.

    Raises:
        Unreadable: The ranks do not divide the whole batch.
    """
    each = _size(given, "device_train_batch_size")
    if isinstance(each, int):
        return each
    whole = _global_batch_size(given)
    if whole is None or given.topology is None:
        return None
    part, rest = divmod(whole, given.topology.world_size)
    if rest or not part:
        raise Unreadable(f"must be a multiple of the {given.topology.world_size} ranks, got {whole}; write one")
    return part


def _plan(given: DocumentValues) -> tuple[Any, Any]:
    """Micro-batch and accumulation; None for what nothing says."""
    part, micro = _part(given), _size(given, "device_train_microbatch_size")
    windows = _size(given, "device_train_grad_accum", "grad_accum")
    if isinstance(micro, int):
        if part is None:
            return micro, _RANKS if _global_batch_size(given) else windows
        even = max(size for size in range(1, min(micro, part) + 1) if part % size == 0)
        return even, part // even
    if isinstance(windows, int):
        return (None if part is None else -(-part // windows)) or _RANKS, windows
    undecided = micro or windows or _AUTOMATIC
    return undecided, undecided


def _micro(value: Any, given: DocumentValues) -> KeyEffect:
    micro, _ = _plan(given)
    if isinstance(micro, Undecided):
        return KeyEffect(Fit.NEEDS_INPUT, f"the value comes from {micro.who}", {"training.micro_batch_size": micro})
    asked = integer(1)(value)
    fields = {"training.micro_batch_size": micro}
    if micro == asked:
        return KeyEffect(fields=fields)
    return KeyEffect(
        Fit.EQUIVALENT, f"micro-batches of {micro} divide the batch of a rank; Composer's last one is smaller", fields
    )


def _global(value: Any, given: DocumentValues) -> KeyEffect:
    whole = integer(1)(value)
    _, windows = _plan(given)
    if isinstance(windows, int) and given.topology:
        return KeyEffect(fields={"training.gradient_accumulation_steps": windows})
    fields: dict[str, Any] = {"training.global_batch_size": whole}
    if windows is not None:
        fields["training.gradient_accumulation_steps"] = windows
    if isinstance(windows, Undecided):
        return KeyEffect(Fit.NEEDS_INPUT, f"the number of micro-batches comes from {windows.who}", fields)
    return KeyEffect(fields=fields)


def _each(value: Any, given: DocumentValues) -> KeyEffect:
    integer(1)(value)
    _, windows = _plan(given)
    if isinstance(windows, int):
        return KeyEffect(fields={"training.gradient_accumulation_steps": windows})
    return KeyEffect(Fit.NEEDS_INPUT, "the batch of one rank; write training.gradient_accumulation_steps")


def _windows(value: Any, given: DocumentValues) -> KeyEffect:
    micro, windows = _plan(given)
    fields = {"training.gradient_accumulation_steps": windows}
    if "device_train_microbatch_size" not in given and micro is not None:
        fields["training.micro_batch_size"] = micro
    undecided = next((found for found in fields.values() if isinstance(found, Undecided)), None)
    if undecided:
        return KeyEffect(Fit.NEEDS_INPUT, f"the value comes from {undecided.who}", fields)
    return KeyEffect(fields=fields)


_SIZE, _STEPS = "training.micro_batch_size", "training.gradient_accumulation_steps"

BATCHES = {
    "global_train_batch_size": Key(_global, f"training.global_batch_size, {_STEPS}"),
    "train_batch_size": Key(
        _global, f"training.global_batch_size, {_STEPS}", note="an older name of global_train_batch_size"
    ),
    "device_train_batch_size": Key(_each, _STEPS),
    "device_train_microbatch_size": Key(_micro, _SIZE),
    "device_train_grad_accum": Key(_windows, f"{_STEPS}, {_SIZE}"),
    "grad_accum": Key(_windows, f"{_STEPS}, {_SIZE}", note="an older name of device_train_grad_accum"),
}
"""The rows of batch sizes."""
