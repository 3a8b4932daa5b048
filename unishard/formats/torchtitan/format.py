"""Reads torchtitan's TOML, its data parallelism through FSDP's own table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from unishard.config.describe import shown
from unishard.config.nested import Native, flat
from unishard.config.topology import Topology
from unishard.contract.entries import Entry, KeyEffect, Path, Unreadable, interpret
from unishard.contract.rules import Fit
from unishard.formats.engine_block import EngineBlock, Spot, combined
from unishard.formats.format import Format
from unishard.formats.source import Source
from unishard.formats.torchtitan.keys import DEGREES, ENGINE, KEYS, RESHARDING, degree
from unishard.formats.torchtitan.older_keys import current_keys, of_a_fork, own_of, placed
from unishard.formats.undecided import open_end

__all__ = ["FORMAT"]

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
        broken = [Entry((name,), data[name], _NO_TABLE) for name in _TABLES if not _is_table(data.get(name, {}))]
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


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping)


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
