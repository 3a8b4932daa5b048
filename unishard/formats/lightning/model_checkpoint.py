"""What Lightning's ModelCheckpoint says (2.6.6, pytorch/callbacks/model_checkpoint.py)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from unishard.config.describe import shown
from unishard.contract.entries import Entry, KeyEffect, Path, Undecided, Unreadable
from unishard.contract.key_rows import integer, text
from unishard.contract.rules import Fit
from unishard.formats.lightning.built import Built, built, short

_EPOCHS = "saves after epochs; call engine.save() there, or set checkpoint.every_steps"
_ANOTHER = "a second ModelCheckpoint; call engine.save() in your loop where this one saves"
_BEST = (
    "keeps those whose {} is the best, and your loop evaluates; call engine.save(metric=...) there, and set "
    "checkpoint.keep_best"
)
_LOGGER = Undecided("the logger's directory, since ModelCheckpoint has no dirpath")
_TIME = re.compile(r"(?:(?P<days>\d+) days?, )?(?P<hours>\d+):(?P<minutes>\d+):(?P<seconds>\d+(?:\.\d+)?)")


def saving_entries(value: Any, path: Path) -> Iterator[Entry]:
    """What the ModelCheckpoints among the callbacks say, an entry for each of their arguments that counts.

    Args:
        value: The callbacks.
        path: Where they stand.
    """
    fields_so_far: dict[str, Any] = {}
    for index, item in enumerate(value if isinstance(value, list | tuple) else [value]):
        callback = built(item)
        if callback is None or short(callback.path) != "ModelCheckpoint":
            continue
        place = (*path, str(index))
        entries = list(_arguments(callback, place))
        fields = {field: value for entry in entries for field, value in entry.effect.fields.items()}
        if any(field in fields_so_far and fields_so_far[field] != value for field, value in fields.items()):
            yield Entry(place, callback.path, KeyEffect(Fit.NEEDS_INPUT, _ANOTHER))
            continue
        fields_so_far |= fields
        yield from entries


def _arguments(callback: Built, place: Path) -> Iterator[Entry]:
    arguments = {name: item for name, item in callback.arguments.items() if item is not None}
    steps, time, top = (
        arguments.get("every_n_train_steps"),
        arguments.get("train_time_interval"),
        arguments.get("save_top_k", 1),
    )

    def entry(name: str, effect: KeyEffect) -> Entry:
        at = (*place, *callback.inside.get(name, ()), name)
        return Entry(at, arguments.get(name), effect, assumed=name not in arguments)

    if top == 0:
        return
    try:
        if "dirpath" in arguments:
            yield entry("dirpath", KeyEffect(fields={"checkpoint.dir": text(arguments["dirpath"])}))
        if not steps and time is None:
            yield Entry(place, callback.path, KeyEffect(Fit.NEEDS_INPUT, _EPOCHS))
            return
        if "dirpath" not in arguments:
            yield entry(
                "dirpath",
                KeyEffect(Fit.NEEDS_INPUT, f"the value comes from {_LOGGER.who}", {"checkpoint.dir": _LOGGER}),
            )
        if steps:
            yield entry("every_n_train_steps", KeyEffect(fields={"checkpoint.every_steps": integer(1)(steps)}))
        if time is not None:
            yield entry("train_time_interval", KeyEffect(fields={"checkpoint.every_minutes": minutes_of(time)}))
        yield _kept(arguments, entry)
    except Unreadable as error:
        yield Entry(place, callback.path, KeyEffect(Fit.UNSUPPORTED, f"has an argument that {error}"))


def _kept(arguments: Mapping[str, Any], entry: Any) -> Entry:
    """How many are kept: without a monitor the newest or all, and with the monitor `step` the newest."""
    monitor, top = arguments.get("monitor"), integer(-1)(arguments.get("save_top_k", 1))
    newest = monitor == "step" and arguments.get("mode") == "max"
    if top > 1 and monitor is None:
        raise Unreadable(
            f"must be -1, 0 or 1 without a monitor, got save_top_k {top}; or write monitor: step, mode: max"
        )
    if monitor is not None and not newest and top > 0:
        return entry("monitor", KeyEffect(Fit.NEEDS_INPUT, _BEST.format(shown(monitor))))  # type: ignore[no-any-return]
    return entry("save_top_k", KeyEffect(fields={"checkpoint.keep_last": None if top < 0 else top}))  # type: ignore[no-any-return]


def minutes_of(value: Any) -> float:
    """A `timedelta`, as jsonargparse reads it from text."""
    match = _TIME.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise Unreadable(f"must be a time such as '1:30:00', got train_time_interval {shown(value)}; write one")
    parts = {name: float(item) for name, item in match.groupdict().items() if item}
    try:
        minutes = timedelta(**parts) / timedelta(minutes=1)
    except OverflowError:
        minutes = 0.0
    if not minutes:
        raise Unreadable("must be above 0 and less than some years; write a time such as '1:30:00'")
    return minutes
