"""What Lightning's ModelCheckpoint says, and how it says a field (2.6.6, pytorch/callbacks/model_checkpoint.py)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from unishard.config import Config
from unishard.config.describe import shown
from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.contract.entries import Entry, KeyEffect, Path, Undecided, Unreadable
from unishard.contract.field_rows import asked, exact, keeps_more, row, when_default
from unishard.contract.key_rows import integer, number, text
from unishard.contract.rules import SCRIPT, Fit, Rule, approximate, needs_input
from unishard.formats.lightning.shape import Built, built, short

_CLASS = "lightning.pytorch.callbacks.ModelCheckpoint"
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
    said: dict[str, Any] = {}
    for index, item in enumerate(value if isinstance(value, list | tuple) else [value]):
        found = built(item)
        if found is None or short(found.path) != "ModelCheckpoint":
            continue
        place = (*path, str(index))
        entries = list(_arguments(found, place))
        fields = {field: value for entry in entries for field, value in entry.effect.fields.items()}
        if any(field in said and said[field] != value for field, value in fields.items()):
            yield Entry(place, found.path, KeyEffect(Fit.NEEDS_INPUT, _ANOTHER))
            continue
        said |= fields
        yield from entries


def _arguments(found: Built, place: Path) -> Iterator[Entry]:
    arguments = {name: item for name, item in found.arguments.items() if item is not None}
    steps, time, top = (
        arguments.get("every_n_train_steps"),
        arguments.get("train_time_interval"),
        arguments.get("save_top_k", 1),
    )

    def entry(name: str, effect: KeyEffect) -> Entry:
        at = (*place, *found.inside.get(name, ()), name)
        return Entry(at, arguments.get(name), effect, assumed=name not in arguments)

    if top == 0:
        return
    try:
        if "dirpath" in arguments:
            yield entry("dirpath", KeyEffect(fields={"checkpoint.dir": text(arguments["dirpath"])}))
        if not steps and time is None:
            yield Entry(place, found.path, KeyEffect(Fit.NEEDS_INPUT, _EPOCHS))
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
        yield Entry(place, found.path, KeyEffect(Fit.UNSUPPORTED, f"has an argument that {error}"))


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
    """A `timedelta`, as jsonargparse reads it from text or Hydra builds it."""
    found = built(value) if isinstance(value, Mapping) else None
    if found and short(found.path) == "timedelta":
        return _positive({name: number(0)(item) for name, item in found.arguments.items() if name in _UNITS})
    parts = _TIME.fullmatch(value.strip()) if isinstance(value, str) else None
    if parts is None:
        raise Unreadable(f"must be a time such as '1:30:00', got train_time_interval {shown(value)}; write one")
    return _positive({name: float(item) for name, item in parts.groupdict().items() if item})


_UNITS = ("weeks", "days", "hours", "minutes", "seconds", "milliseconds", "microseconds")


def _positive(parts: Mapping[str, float]) -> float:
    try:
        minutes = timedelta(**parts) / timedelta(minutes=1)
    except OverflowError:
        minutes = 0.0
    if not minutes:
        raise Unreadable("must be above 0 and less than some years; write a time such as '1:30:00'")
    return minutes


def _callbacks(cfg: Config, topology: Topology) -> Native:
    """One ModelCheckpoint for each interval: Lightning refuses two intervals in one."""
    asked = cfg.checkpoint
    intervals: list[Native] = []
    if asked.every_steps is not None:
        intervals.append({"every_n_train_steps": asked.every_steps})
    if asked.every_minutes is not None:
        intervals.append({"train_time_interval": str(timedelta(minutes=asked.every_minutes) or timedelta.resolution)})
    if not intervals:
        return {"trainer": {"enable_checkpointing": False}}
    made = [
        {"class_path": _CLASS, "init_args": {"dirpath": asked.dir, **interval, **_top(cfg)}} for interval in intervals
    ]
    return {"trainer": {"callbacks": made}}


def _top(cfg: Config) -> Native:
    count = cfg.checkpoint.keep_last
    if count is None or keeps_more(cfg):
        return {"save_top_k": -1}
    return {"save_top_k": 1} if count == 1 else {"save_top_k": count, "monitor": "step", "mode": "max"}


_ALL = "ModelCheckpoint keeps the newest or all: all are kept"

SAVING: Mapping[str, Rule] = {
    "checkpoint.dir": exact(
        "dirpath of ModelCheckpoint",
        when_default("checkpoint.dir"),
        needs_input(
            "nothing is saved automatically",
            lambda cfg: not cfg.checkpoint.automatic,
            "the directory of trainer.save_checkpoint(...) in your script",
        ),
        to=_callbacks,
    ),
    "checkpoint.every_steps": Rule(
        Fit.EXACT,
        "every_n_train_steps of ModelCheckpoint, enable_checkpointing",
        "null: enable_checkpointing=False",
        _callbacks,
    ),
    "checkpoint.every_minutes": exact("train_time_interval of ModelCheckpoint", to=_callbacks),
    "checkpoint.keep_last": row(
        Fit.EXACT,
        "save_top_k of ModelCheckpoint",
        'with monitor="step" and mode="max", which keeps the newest',
        when_default("checkpoint.keep_last", "-1 keeps all"),
        approximate("with keep_every or keep_best", keeps_more, _ALL),
        needs_input(
            "nothing is saved automatically",
            lambda cfg: not cfg.checkpoint.automatic,
            "delete older checkpoints in your script",
        ),
        to=_callbacks,
    ),
    **asked(
        Fit.NEEDS_INPUT,
        SCRIPT,
        {"checkpoint.on_signal": "SLURMEnvironment(requeue_signal=...), or a handler that sets trainer.should_stop"},
    ),
}
"""How each field is said."""
