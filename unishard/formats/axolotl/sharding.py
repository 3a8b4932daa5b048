"""axolotl's FSDP keys, handed on to FSDP's own table (axolotl 0.18.0, schemas/fsdp.py and `setup_fsdp_envs` in utils/trainer.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from unishard.config.describe import shown
from unishard.config.topology import Topology
from unishard.formats.axolotl.keys import TOOL
from unishard.formats.hf.loop import off
from unishard.formats.hf.sharding import combined, words_of
from unishard.formats.hf.switches import FSDP
from unishard.formats.source import Source
from unishard.mapping.entries import Entry, Meaning, Unreadable
from unishard.mapping.key_rows import integer
from unishard.mapping.rules import Fit
from unishard.plugins import registry

__all__ = ["sharded"]

_NAMES: Mapping[str, str] = {
    "version": "version",
    "offload_params": "cpu_offload",
    "cpu_offload_pin_memory": "pin_memory",
    "final_state_dict_type": "state_dict_type",
    **{
        name: name
        for name in (
            "activation_checkpointing",
            "sync_module_states",
            "cpu_ram_efficient_loading",
            "use_orig_params",
            "state_dict_type",
            "auto_wrap_policy",
            "transformer_layer_cls_to_wrap",
            "min_num_params",
            "reshard_after_forward",
        )
    },
}
"""Keys of `FSDPConfig` in FSDP's own words."""

_STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
_OVERLOOKED = f"{TOOL} has no such key in fsdp_config and overlooks it"
_STRATEGY = f"{_OVERLOOKED}; the strategy comes from fsdp or reshard_after_forward, and is FULL_SHARD without them"
_MESH = ("dp_shard_size", "dp_replicate_size")


def sharded(source: Source, topology: Topology | None) -> list[Entry]:
    """The entries of `fsdp`, `fsdp_config`, `fsdp_version`, `dp_shard_size` and `dp_replicate_size`."""
    data = source.data
    config = data.get("fsdp_config")
    if off(data.get("fsdp")) and off(config):
        return _idle(data)
    if not isinstance(config, Mapping) and not off(config):
        what = f"must be a mapping, got {shown(config)}; write one"
        others = {key: value for key, value in data.items() if key != "fsdp_config"}
        return [Entry(("fsdp_config",), config, Meaning(Fit.UNSUPPORTED, what)), *_idle(others)]
    return _entries(data, dict(config or {}), topology)


def _idle(data: Mapping[str, Any]) -> list[Entry]:
    entries = []
    for key in ("fsdp", "fsdp_config", "fsdp_version", *_MESH):
        if key in data:
            note = "is off" if off(data[key]) else "is read where fsdp_config is there alone"
            entries.append(Entry((key,), data[key], Meaning(Fit.IGNORED, note, kept=True)))
    return entries


def _entries(data: Mapping[str, Any], config: Mapping[str, Any], topology: Topology | None) -> list[Entry]:
    plain = {str(key).removeprefix("fsdp_"): str(key) for key in config}
    empty = [key for key in ("fsdp_config", "fsdp_version") if key in data and (off(data[key]) or not data[key])]
    stated = None if "fsdp_version" in empty else data.get("fsdp_version")
    version = stated or next((config[plain[key]] for key in ("version",) if key in plain), None) or 1
    native: dict[str, Any] = {"version": version}
    places: dict[str, tuple[str, ...]] = {}
    if stated:
        places["version"] = ("fsdp_version",)
    entries = [Entry((key,), data[key], Meaning(Fit.IGNORED, "is empty", kept=True)) for key in empty]
    for name, key in plain.items():
        value, path = config[key], ("fsdp_config", key)
        if name == "version" and "version" in places:
            entries.append(_second_version(path, value, version))
        elif name in _NAMES and _NAMES[name] not in places and value is not None:
            native[_NAMES[name]] = value
            places[_NAMES[name]] = path
        else:
            note = "is empty" if value is None else _STRATEGY if name == "sharding_strategy" else _OVERLOOKED
            entries.append(Entry(path, value, Meaning(Fit.IGNORED, note, kept=True)))
    wrong = _words(data, native, str(version) == "2")
    try:
        mesh = _mesh(data)
    except Unreadable as error:
        wrong_mesh = [Entry((key,), data[key], Meaning(Fit.UNSUPPORTED, str(error))) for key in _MESH if key in data]
        others = {key: value for key, value in data.items() if key not in _MESH}
        return entries + wrong_mesh + _placed(others, native, places, wrong, topology)
    if mesh:
        native["mesh"] = mesh
    return entries + _placed(data, native, places, wrong, topology)


def _second_version(path: tuple[str, ...], value: Any, version: Any) -> Entry:
    if str(value) == str(version):
        return Entry(path, value, Meaning(fields={"backend": "fsdp"}))
    return Entry(path, value, Meaning(Fit.IGNORED, "fsdp_version counts more", kept=True))


def _words(data: Mapping[str, Any], native: dict[str, Any], second: bool) -> str:
    """Puts the words of `fsdp` among the arguments where nothing else says it; what is wrong with them."""
    value = data.get("fsdp")
    if off(value):
        return ""
    try:
        words = [word.lower() for word in words_of(value)]
    except Unreadable as error:
        return str(error)
    strategy = next((word for word in words if word in _STRATEGIES), None)
    if "offload" in words:
        native.setdefault("cpu_offload", True)
    if strategy and second and strategy not in _STRATEGIES[:2]:
        return f"transformers 5 takes {strategy} with fsdp_version 1 alone; write dp_replicate_size for groups, or full_shard"
    if strategy and second:
        native.setdefault("reshard_after_forward", strategy == "full_shard")
    elif strategy:
        # Accelerate gets it under this name with version 1 as well.
        native.setdefault("reshard_after_forward", strategy)
    strange = [word for word in words if word not in (*_STRATEGIES, "offload", "auto_wrap")]
    return f"knows no word {', '.join(strange)}; write full_shard, offload or auto_wrap" if strange else ""


def _mesh(data: Mapping[str, Any]) -> Mapping[str, int] | None:
    """The sizes of the groups, if there are groups.

    Raises:
        Unreadable: One of them is no number.
    """
    sizes = {}
    for key, axis in (("dp_replicate_size", "replicate"), ("dp_shard_size", "shard")):
        if not off(data.get(key)):
            sizes[axis] = integer(1)(data[key])
    # Without groups, all ranks share one copy, however many there are.
    return sizes if sizes.get("replicate", 1) > 1 else None


def _placed(
    data: Mapping[str, Any], native: Mapping[str, Any], places: Mapping[str, tuple[str, ...]], wrong: str, topology: Topology | None
) -> list[Entry]:
    first = {} if str(native["version"]) == "2" else {"sharding_strategy": "FULL_SHARD"}
    defaults = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", **first}
    parsed = registry.get("fsdp").parse(native, defaults=defaults, topology=topology)
    top = {id(entry): entry.path[0] for entry in parsed}
    entries = []
    asked = [entry for entry in parsed if top[id(entry)] in native and top[id(entry)] not in (*places, "version", "mesh")]
    if FSDP in data:
        entries.append(combined((FSDP,), data[FSDP], asked, wrong))
    entries += _groups(data, [entry for entry in parsed if top[id(entry)] == "mesh"])
    for entry in parsed:
        name = top[id(entry)]
        if name in places:
            kept = entry.meaning.fit is Fit.IGNORED and not entry.meaning.fields
            entries.append(replace(entry, path=places[name], meaning=replace(entry.meaning, kept=kept)))
        elif name == "version" or name not in native:
            entries.append(replace(entry, path=("fsdp_config", *entry.path), assumed=True))
    return entries


def _groups(data: Mapping[str, Any], mesh: list[Entry]) -> list[Entry]:
    said = [key for key in _MESH if key in data]
    if mesh:
        return [combined((key,), data[key], mesh) for key in said]
    note = "all ranks share one copy, however many there are"
    return [Entry((key,), data[key], Meaning(Fit.IGNORED, "is off" if off(data[key]) else note, kept=True)) for key in said]
