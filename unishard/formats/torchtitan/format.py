"""Reads torchtitan's TOML, its data parallelism through FSDP's own table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from unishard.config.describe import shown
from unishard.config.nested import Native, flat
from unishard.config.topology import Topology
from unishard.contract.entries import Entry, Key, KeyEffect, Path, Unreadable, interpret
from unishard.contract.key_rows import drops
from unishard.contract.rules import Fit
from unishard.formats.engine_block import EngineBlock, Spot, combined
from unishard.formats.format import Format
from unishard.formats.names import NO_LOGS
from unishard.formats.source import Source
from unishard.formats.torchtitan.keys import DEGREES, ENGINE, KEYS, RESHARDING, degree
from unishard.formats.undecided import open_end

_DEGREES = (
    "tensor_parallel_degree",
    "pipeline_parallel_degree",
    "data_parallel_shard_degree",
    "data_parallel_replicate_degree",
)
_MOVED: Mapping[str, str] = {
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    **{f"training.{name}": f"parallelism.{name}" for name in _DEGREES},
    **{
        f"experimental.{name}": f"parallelism.{name}"
        for name in (
            "pipeline_parallel_degree",
            "context_parallel_degree",
            "enable_async_tensor_parallel",
            "enable_compiled_autograd",
        )
    },
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "optimizer.fused": "optimizer.implementation",
}


def current_keys(data: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The document with its older keys at their new places, and the older key at each of these; a key that stands there
    already stays.
    """
    tables = {name: dict(value) if isinstance(value, Mapping) else value for name, value in data.items()}
    moved: dict[str, str] = {}
    for old, new in _MOVED.items():
        (table, key), (home, name) = old.split("."), new.split(".")
        source, target = tables.get(table), tables.setdefault(home, {}) if table in tables else None
        if not isinstance(source, dict) or not isinstance(target, dict) or key not in source or name in target:
            continue
        target[name] = source.pop(key)
        moved[new] = old
    return {name: value for name, value in tables.items() if value != {} or name in data}, moved


def placed(entry: Entry, moved: Mapping[str, str]) -> Entry:
    """The entry at the place where the file has its key."""
    old = moved.get(entry.key)
    if old is None:
        return entry
    table, _, key = old.partition(".")
    return entry._replace(path=(table, key), effect=entry.effect._replace(copy_verbatim=False, rejected_upstream=True))


_KNOWN = frozenset(key.partition(".")[0] for key in KEYS)
_FORK = (
    "not a key of torchtitan 0.2: only a fork that adds it reads it; what it does to the training is not carried over"
)
_LOGS = ("metrics", "profiling")
_ROW = drops("not a table of JobConfig: only the module that adds it reads it", unknown=True)


def own_of(data: Mapping[str, Any]) -> Mapping[str, Key]:
    """Rows for unknown tables, except those that only misspell a known one."""
    strange = [
        name
        for name, value in data.items()
        if isinstance(value, Mapping) and value and name not in _KNOWN and "." not in name
    ]
    return {name: _ROW for name in strange if not get_close_matches(name, _KNOWN, 1, 0.75)}


def of_a_fork(entry: Entry, known: Iterable[str]) -> Entry:
    """The entry; an unknown key in a table of JobConfig is reported unless it misspells a known one: a fork reads
    it. In the tables about logs it does not train.
    """
    refused = (
        entry.effect.fit is Fit.UNSUPPORTED and entry.effect.unknown and len(entry.path) > 1 and entry.path[0] in _KNOWN
    )
    if refused and entry.path[0] in _LOGS:
        return entry._replace(effect=KeyEffect(Fit.IGNORED, NO_LOGS, unknown=True))
    if not refused or "did you mean" in entry.effect.note or get_close_matches(entry.key, known, 1, 0.9):
        return entry
    return entry._replace(effect=KeyEffect(Fit.APPROXIMATE, _FORK, unknown=True, copy_verbatim=True, notable=True))


_TOOL = "torchtitan 0.2"
_SHARD, _REPLICATE = "parallelism.data_parallel_shard_degree", "parallelism.data_parallel_replicate_degree"
_RESHARD = "parallelism.fsdp_reshard_after_forward"
_HANDED = {_SHARD, _REPLICATE, _RESHARD, *ENGINE}
_TABLES = ("parallelism", "training", "optimizer", "lr_scheduler", "activation_checkpoint", "compile", "model", "debug")
_NODE = 8
"""GPUs of a node, where their number is unknown."""


class TorchtitanFormat(Format):
    """TOML of torchtitan."""

    name = "torchtitan"
    tool = _TOOL
    keys = KEYS

    def ranks(self, source: Source) -> Topology | None:
        """The product of the degrees, where the file names both."""
        return _ranks(current_keys(source.data)[0])

    def entries(self, source: Source, topology: Topology | None) -> Sequence[Entry]:
        """What the file says, and what torchtitan's JobConfig fills in."""
        data, moved = current_keys(source.data)
        broken = [
            Entry((name,), data[name], _NO_TABLE) for name in _TABLES if not isinstance(data.get(name, {}), Mapping)
        ]
        whole = {key: value for key, value in data.items() if key not in {entry.path[0] for entry in broken}}
        said = dict(flat({name: value for name, value in whole.items() if "." not in name and value != {}}))
        keys = {**KEYS, **own_of(whole)}
        own = (of_a_fork(entry, _HANDED) for entry in interpret(keys, _rest(whole), tool=_TOOL, topology=topology))
        entries = [*own, *broken, *_parallel(said, topology)]
        entries += open_end(entries, ("training", "steps"))
        entries = [placed(entry, moved) for entry in entries]
        order = _order(dict(flat(source.data)))
        return sorted(entries, key=lambda entry: order.get(entry.key, len(order)))


FORMAT = TorchtitanFormat()


_NO_TABLE = KeyEffect(Fit.UNSUPPORTED, "must be a table of keys; write it as [name] with its keys below")


def _rest(data: Mapping[str, Any], above: Path = ()) -> Native:
    """What is not handed on to FSDP's own table."""
    rest: Native = {}
    for name, value in data.items():
        path = (*above, name)
        if isinstance(value, Mapping) and value:
            rest |= {name: inner} if (inner := _rest(value, path)) else {}
        elif len(path) == 1 or ".".join(path) not in _HANDED:
            rest[name] = value
    return rest


def _order(keys: Iterable[str]) -> dict[str, int]:
    """Where each key and each table stands in the file."""
    order: dict[str, int] = {}
    for key in keys:
        parts = key.split(".")
        for length in range(1, len(parts) + 1):
            order.setdefault(".".join(parts[:length]), len(order))
    return order


def _ranks(data: Mapping[str, Any]) -> Topology | None:
    """The ranks that the degrees come to, where all of them are said."""
    said = dict(flat(data))
    count = 1
    for key in (_SHARD, _REPLICATE, *(f"parallelism.{name}" for name in DEGREES)):
        value = said.get(key, -1 if key == _SHARD else 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            return None
        count *= value
    return Topology(world_size=count, local_world_size=min(count, _NODE))


def _parallel(said: Mapping[str, Any], topology: Topology | None) -> Iterator[Entry]:
    """What FSDP's own table makes of the keys that torchtitan hands on, each at its own place."""
    mesh, broken = _mesh(said)
    wrong = {entry.key for entry in broken}
    yield from broken
    block = EngineBlock("fsdp", ("parallelism",))
    block.add("version", 2, Spot(("parallelism",), 2, assumed=True))
    if mesh:
        block.add("mesh", mesh, _spot(_SHARD, said), _spot(_REPLICATE, said))
    word = said.get(_RESHARD, "default")
    if isinstance(word, str) and word.lower() in RESHARDING:
        block.add("reshard_after_forward", RESHARDING[word.lower()], _spot(_RESHARD, said))
    else:
        note = f"must be one of {', '.join(RESHARDING)}, got {shown(word)}; write one of them"
        yield Entry(tuple(_RESHARD.split(".")), word, KeyEffect(Fit.UNSUPPORTED, note))
    for own, (key, silent) in ENGINE.items():
        block.add(key, said.get(own, silent), _spot(own, said))
    yield from block.entries(topology=topology)
    if not mesh:
        yield from (
            combined(_spot(key, said), [_ALL]) for key in (_SHARD, _REPLICATE) if key in said and key not in wrong
        )


_ALL = KeyEffect(Fit.EXACT, "all ranks share one copy", {"sharding.strategy": "full_shard"})
_DEFAULTS: Mapping[str, Any] = {
    _SHARD: -1,
    _REPLICATE: 1,
    _RESHARD: "default",
    **{key: silent for key, (_, silent) in ENGINE.items()},
}


def _mesh(said: Mapping[str, Any]) -> tuple[Native, list[Entry]]:
    """The axes that FSDP2 gets, and the degrees that are none. Nothing where all ranks share one copy."""
    sizes, broken = {}, []
    for axis, key in (("replicate", _REPLICATE), ("shard", _SHARD)):
        try:
            sizes[axis] = degree(said.get(key, _DEFAULTS[key]))
        except Unreadable as error:
            broken.append(Entry(tuple(key.split(".")), said[key], KeyEffect(Fit.UNSUPPORTED, str(error))))
    known = {axis: size for axis, size in sizes.items() if size > 0}
    return ({} if broken or known == {"replicate": 1} else known), broken


def _spot(key: str, said: Mapping[str, Any]) -> Spot:
    """Where a key stands; assumed where the file does not have it."""
    return Spot(tuple(key.split(".")), said.get(key, _DEFAULTS.get(key)), assumed=key not in said)
