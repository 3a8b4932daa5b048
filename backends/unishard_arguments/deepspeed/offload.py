"""What lives in host memory or in files: what DeepSpeed's keys say, and how it says the fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config import Config
from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.contract.entries import DocumentValues, Key, KeyEffect, Unreadable
from unishard.contract.field_rows import exact
from unishard.contract.key_rows import boolean, number, one_of, text
from unishard.contract.render import AUTO
from unishard.contract.rules import Fit, Rule, equivalent, is_
from unishard_arguments.deepspeed.facts import LEAST_STAGE, device, dropped, may_reach, quiet, spelt, stage, undecided
from unishard_deepspeed import fields

_Z = "zero_optimization."
_FIELDS = {"param": "offload.params", "optimizer": "offload.optimizer"}
_PLACES = one_of({"none": "none", "cpu": "cpu", "nvme": "nvme"})
_BY_ACCELERATE = "offload_{}_device of Accelerate's DeepSpeedPlugin, none by default"
_LOW = {
    "param": "DeepSpeed offloads parameters only at stage 3",
    "optimizer": "DeepSpeed offloads an optimizer only from stage 1 on",
}


def _place(state: str) -> Key:
    def read(value: Any, document: DocumentValues) -> KeyEffect:
        if value == AUTO and may_reach(document, LEAST_STAGE[state]):
            return undecided(_BY_ACCELERATE.format(state), _FIELDS[state])
        place = "none" if value in (None, AUTO) else _PLACES(value)
        if place != "none" and device(document, state) == "none":
            return dropped(_LOW[state])
        if place == "nvme" and not quiet(text, document.get(f"{_Z}offload_{state}.nvme_path")):
            raise Unreadable("must have an nvme_path beside it, got none; write a directory on a local disk")
        return KeyEffect(fields={_FIELDS[state]: place})

    return Key(read, (_FIELDS[state],))


def _switch(state: str, note: str) -> Key:
    """A boolean of older versions."""

    def read(value: Any, document: DocumentValues) -> KeyEffect:
        if not boolean(value):
            return dropped("is off")
        if device(document, state) == "none":
            return dropped(_LOW[state])
        return KeyEffect(note=note, fields={_FIELDS[state]: "cpu"})

    return Key(read, (_FIELDS[state],), note=note)


def _path(state: str) -> Key:
    def read(value: Any, document: DocumentValues) -> KeyEffect:
        if device(document, state) not in ("nvme", AUTO) or value is None:
            return dropped("only used with nvme")
        return KeyEffect(fields={"offload.nvme_path": text(value)})

    return Key(read, ("offload.nvme_path",))


def _pin(state: str) -> Key:
    def read(value: Any, document: DocumentValues) -> KeyEffect:
        pins = {
            name: document.get(f"{_Z}offload_{name}.pin_memory") for name in _FIELDS if device(document, name) != "none"
        }
        pinned = any(quiet(boolean, True if value is None else value, True) for value in pins.values())
        if device(document, state) == "none" or value == AUTO:
            return dropped("nothing is offloaded here")
        if boolean(value) != pinned:
            return dropped("parameters and optimizer are pinned alike; affects only time")
        return KeyEffect(fields={"offload.pin_memory": pinned})

    return Key(read, ("offload.pin_memory",))


def _pin_both(value: Any, document: DocumentValues) -> KeyEffect:
    if all(device(document, what) == "none" for what in _FIELDS):
        return dropped("nothing is offloaded")
    return KeyEffect(fields={"offload.pin_memory": boolean(value)})


_PART = "the whole optimizer is offloaded; affects only memory"


def _part(value: Any, document: DocumentValues) -> KeyEffect:
    if stage(document) == 3 or value == AUTO or number(0, 1)(value) == 1:
        return dropped(_PART)
    return KeyEffect(
        Fit.IGNORED, f"{_PART}; DeepSpeed 0.19.8 takes less than 1 only at stage 3", rejected_upstream=True
    )


KEYS: Mapping[str, Key] = {
    **{f"{_Z}offload_{what}.device": _place(what) for what in _FIELDS},
    **{f"{_Z}offload_{what}.nvme_path": _path(what) for what in _FIELDS},
    **{f"{_Z}offload_{what}.pin_memory": _pin(what) for what in _FIELDS},
    f"{_Z}offload_optimizer.ratio": Key(_part, (), Fit.IGNORED, _PART),
    f"{_Z}cpu_offload": _switch("optimizer", "deprecated; DeepSpeed means offload_optimizer"),
    f"{_Z}cpu_offload_param": _switch("param", "deprecated; DeepSpeed means offload_param"),
    f"{_Z}cpu_offload_params": spelt(
        _switch("param", "a name of older versions, which DeepSpeed 0.19.8 refuses"),
        "cpu_offload_param",
        rejected_upstream=True,
    ),
    f"{_Z}cpu_offload_use_pin_memory": Key(_pin_both, ("offload.pin_memory",)),
}


def _offload_of(cfg: Config, device: str) -> Native | None:
    if device == "none":
        return None
    place = {"device": device, "pin_memory": cfg.offload.pin_memory}
    return place | ({"nvme_path": cfg.offload.nvme_path} if device == "nvme" else {})


def _optimizer_of(cfg: Config, topology: Topology) -> Native:
    place = _offload_of(cfg, cfg.offload.optimizer)
    if place is None:
        return {}
    # DeepSpeed refuses a torch optimizer on the host unless told otherwise (DeepSpeed 0.19.8, runtime/engine.py,
    # _configure_optimizer).
    own = {"zero_force_ds_cpu_optimizer": False} if cfg.offload.optimizer == "cpu" else {}
    return fields.zero(offload_optimizer=place) | own


def _params_of(cfg: Config, topology: Topology) -> Native:
    place = _offload_of(cfg, cfg.offload.params)
    return fields.zero(offload_param=place) if place else {}


RULES: Mapping[str, Rule] = {
    "offload.params": exact("zero_optimization.offload_param.device", to=_params_of),
    "offload.optimizer": exact(
        "zero_optimization.offload_optimizer.device",
        equivalent(
            *is_("offload.optimizer", "nvme"), "DeepSpeed 0.19.8 makes other updates with torch's optimizers in files"
        ),
        to=_optimizer_of,
    ),
    "offload.pin_memory": Rule(Fit.EXACT, "zero_optimization.offload_param.pin_memory, offload_optimizer.pin_memory"),
    "offload.nvme_path": Rule(Fit.EXACT, "zero_optimization.offload_param.nvme_path, offload_optimizer.nvme_path"),
}
