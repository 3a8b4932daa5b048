"""What torchtitan's TOML says about checkpoints (torchtitan 0.2, components/checkpoint.py and
config/job_config.py).
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import Any

from unishard.contract.entries import DocumentValues, Key, KeyEffect, left_out
from unishard.contract.key_rows import boolean, drops, integer, number, one_of, text
from unishard.contract.rules import Fit

__all__ = ["SAVED"]

_DUMP, _FOLDER = "job.dump_folder", "checkpoint.folder"
_SILENT: Mapping[str, Any] = {
    _DUMP: "./outputs",
    _FOLDER: "checkpoint",
    "checkpoint.interval": 500,
    "checkpoint.keep_latest_k": 10,
}
_LAST = "torchtitan also saves at the end of the training; call engine.save() there"


def _saves(given: DocumentValues) -> bool:
    return given.get("checkpoint.enable") in (True, "true")


def _value(key: str, given: DocumentValues) -> Any:
    return given.get(key) if key in given else _SILENT[key]


def _directory(given: DocumentValues) -> Mapping[str, Any]:
    dump, folder = text(_value(_DUMP, given)), text(_value(_FOLDER, given))
    return {"checkpoint.dir": folder if dump == "." else posixpath.join(dump, folder)}


def _interval(given: DocumentValues) -> Mapping[str, Any]:
    """In updates, or, in older versions, in seconds."""
    if str(given.get("checkpoint.interval_type")).lower() == "seconds":
        return {"checkpoint.every_minutes": number(1e-9)(_value("checkpoint.interval", given)) / 60}
    return {"checkpoint.every_steps": integer(1)(_value("checkpoint.interval", given))}


def _limit(given: DocumentValues) -> Mapping[str, Any]:
    return {"checkpoint.keep_last": integer(0)(_value("checkpoint.keep_latest_k", given)) or None}


def _enabled(value: Any, given: DocumentValues) -> KeyEffect:
    if not boolean(value):
        return left_out("is off")
    fields = dict(_directory(given)) if _DUMP not in given and _FOLDER not in given else {}
    fields |= {} if "checkpoint.interval" in given else _interval(given)
    fields |= {} if "checkpoint.keep_latest_k" in given else _limit(given)
    return KeyEffect(Fit.EQUIVALENT, _LAST, fields) if fields else left_out(_LAST)


def _key(fields: str, read: Any, note: str = "") -> Key:
    """A key that is only used where checkpoints are written."""

    def effect(value: Any, given: DocumentValues) -> KeyEffect:
        return KeyEffect(fields=read(given)) if _saves(given) else left_out("only used when checkpoint.enable is true")

    return Key(effect, fields, note=note)


def _mode(given: DocumentValues) -> Mapping[str, Any]:
    modes = {"disabled": False, "async": True, "async_with_pinned_mem": True}
    return {"checkpoint.async_save": one_of(modes)(given.get("checkpoint.async_mode"))}


_JOB = "config_file description use_for_integration_test print_args print_config save_config_file custom_config_module"
_OTHERS = (
    "interval_type initial_load_path initial_load_model_only initial_load_in_hf initial_load_in_hf_quantized "
    "last_save_model_only last_save_in_hf model_weights_only export_dtype create_seed_checkpoint load_step load_only "
    "exclude_from_loading enable_first_step_checkpoint enable_ft_dataloader_checkpoints"
)

SAVED: Mapping[str, Key] = {
    _DUMP: _key("checkpoint.dir", _directory, "with checkpoint.folder below it"),
    **{f"job.{name}": drops("launcher setting") for name in _JOB.split()},
    "checkpoint.enable": Key(
        _enabled, "checkpoint.dir, checkpoint.every_steps, checkpoint.keep_last", Fit.EQUIVALENT, _LAST
    ),
    _FOLDER: _key("checkpoint.dir", _directory, "below job.dump_folder"),
    "checkpoint.interval": _key(
        "checkpoint.every_steps", _interval, "checkpoint.every_minutes where interval_type is seconds"
    ),
    "checkpoint.keep_latest_k": _key("checkpoint.keep_last", _limit, "0 keeps all"),
    "checkpoint.async_mode": _key("checkpoint.async_save", _mode),
    **{f"checkpoint.{name}": drops("affects only the files of checkpoints") for name in _OTHERS.split()},
}
"""What each key says."""
