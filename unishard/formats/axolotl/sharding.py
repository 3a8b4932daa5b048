"""axolotl's FSDP keys, handed on to FSDP's own table (axolotl 0.18.0, schemas/fsdp.py and `setup_fsdp_envs` in
utils/trainer.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from unishard.config.describe import shown
from unishard.config.topology import Topology
from unishard.contract.entries import Entry, KeyEffect, Unreadable, left_out
from unishard.contract.key_rows import integer
from unishard.contract.rules import Fit
from unishard.formats.axolotl.keys import TOOL
from unishard.formats.engine_block import EngineBlock, Spot, combined
from unishard.formats.hf.loop import FSDP, off
from unishard.formats.hf.sharding import words_of
from unishard.formats.names import names
from unishard.formats.source import Source

_NAMES: Mapping[str, str] = {
    "version": "version",
    "offload_params": "cpu_offload",
    "cpu_offload_pin_memory": "pin_memory",
    "final_state_dict_type": "state_dict_type",
    **{
        name: name
        for name in names(
            "activation_checkpointing sync_module_states cpu_ram_efficient_loading use_orig_params state_dict_type "
            "auto_wrap_policy transformer_layer_cls_to_wrap min_num_params reshard_after_forward"
        )
    },
}
"""Keys of `FSDPConfig` in FSDP's own words."""

_STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
_OVERLOOKED = f"{TOOL} has no such key in fsdp_config and ignores it"
_STRATEGY = f"{TOOL} ignores it; write fsdp_config.reshard_after_forward (default: full_shard)"
_MESH = ("dp_shard_size", "dp_replicate_size")


def sharded(source: Source, topology: Topology | None) -> list[Entry]:
    """The entries of `fsdp`, `fsdp_config`, `fsdp_version`, `dp_shard_size` and `dp_replicate_size`."""
    data = source.data
    config = data.get("fsdp_config")
    if off(data.get("fsdp")) and off(config):
        return _ignored(data)
    if not isinstance(config, Mapping) and not off(config):
        what = f"must be a mapping, got {shown(config)}; write one"
        others = {key: value for key, value in data.items() if key != "fsdp_config"}
        return [Entry(("fsdp_config",), config, KeyEffect(Fit.UNSUPPORTED, what)), *_ignored(others)]
    return _entries(data, dict(config or {}), topology)


def _ignored(data: Mapping[str, Any]) -> list[Entry]:
    entries = []
    for key in ("fsdp", "fsdp_config", "fsdp_version", *_MESH):
        if key in data:
            note = "is off" if off(data[key]) else "only used with fsdp_config"
            entries.append(Entry((key,), data[key], left_out(note)))
    return entries


def _entries(data: Mapping[str, Any], config: Mapping[str, Any], topology: Topology | None) -> list[Entry]:
    plain = {str(key).removeprefix("fsdp_"): str(key) for key in config}
    empty = [key for key in ("fsdp_config", "fsdp_version") if key in data and (off(data[key]) or not data[key])]
    stated = None if "fsdp_version" in empty else data.get("fsdp_version")
    version = stated or next((config[plain[key]] for key in ("version",) if key in plain), None) or 1
    block = EngineBlock("fsdp", ("fsdp_config",), repeats=True)
    block.add(
        "version",
        version,
        Spot(("fsdp_version",), stated) if stated else Spot(("fsdp_config", "version"), version, assumed=True),
    )
    entries = [Entry((key,), data[key], left_out("is empty")) for key in empty]
    for name, key in plain.items():
        value, path = config[key], ("fsdp_config", key)
        if name == "version" and stated:
            entries.append(_second_version(path, value, version))
        elif name in _NAMES and value is not None and (name == "version" or _NAMES[name] not in block.spots):
            block.add(_NAMES[name], value, Spot(path, value))
        else:
            note = "is empty" if value is None else _STRATEGY if name == "sharding_strategy" else _OVERLOOKED
            entries.append(Entry(path, value, left_out(note)))
    beside = [*_flag(data, block, second=str(version) == "2"), *_groups(data, block)]
    return entries + sorted([*beside, *_block_entries(block, topology)], key=_order)


def _block_entries(block: EngineBlock, topology: Topology | None) -> list[Entry]:
    first = {} if str(block.native["version"]) == "2" else {"sharding_strategy": "FULL_SHARD"}
    return block.entries(defaults={"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", **first}, topology=topology)


def _order(entry: Entry) -> int:
    first = (FSDP, *_MESH)
    return first.index(entry.path[0]) if entry.path[0] in first else len(first)


def _flag(data: Mapping[str, Any], block: EngineBlock, *, second: bool) -> Iterator[Entry]:
    """Puts the words of `fsdp` among the arguments where nothing else says it."""
    if FSDP not in data:
        return
    flag = Spot((FSDP,), data[FSDP], fields={"backend": "fsdp"})
    asked, wrong = _words(data[FSDP], second)
    asked = {name: value for name, value in asked.items() if name not in block.spots}
    for name, value in asked.items():
        block.add(name, value, *([] if wrong else [flag]))
    if wrong:
        yield Entry(flag.path, flag.value, KeyEffect(Fit.UNSUPPORTED, wrong))
    elif not asked:
        yield combined(flag, [])


def _second_version(path: tuple[str, ...], value: Any, version: Any) -> Entry:
    if str(value) == str(version):
        return Entry(path, value, KeyEffect(fields={"backend": "fsdp"}))
    return Entry(path, value, left_out("fsdp_version takes precedence"))


def _words(value: Any, second: bool) -> tuple[dict[str, Any], str]:
    """What the words of `fsdp` say in FSDP's own, and what is wrong with them."""
    if off(value):
        return {}, ""
    try:
        words = [word.lower() for word in words_of(value)]
    except Unreadable as error:
        return {}, str(error)
    strategy = next((word for word in words if word in _STRATEGIES), None)
    asked: dict[str, Any] = {"cpu_offload": True} if "offload" in words else {}
    if strategy and second and strategy not in _STRATEGIES[:2]:
        return asked, f"{strategy} needs fsdp_version: 1; write full_shard, or dp_replicate_size for groups"
    if strategy:
        # Accelerate gets it under this name with version 1 as well.
        asked["reshard_after_forward"] = strategy == "full_shard" if second else strategy
    strange = [word for word in words if word not in (*_STRATEGIES, "offload", "auto_wrap")]
    return asked, f"knows no word {', '.join(strange)}; write full_shard, offload or auto_wrap" if strange else ""


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


def _groups(data: Mapping[str, Any], block: EngineBlock) -> Iterator[Entry]:
    """Puts the groups among the arguments, or says what is wrong with them."""
    said = {key: data[key] for key in _MESH if key in data}
    try:
        mesh = _mesh(data)
    except Unreadable as error:
        yield from (Entry((key,), value, KeyEffect(Fit.UNSUPPORTED, str(error))) for key, value in said.items())
        return
    if mesh:
        block.add("mesh", mesh, *(Spot((key,), value, fields={"backend": "fsdp"}) for key, value in said.items()))
        return
    for key, value in said.items():
        note = "is off" if off(value) else "all ranks share one copy, however many there are"
        yield Entry((key,), value, left_out(note))
