"""Reads Lightning's arguments from a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from unishard.config.topology import Topology
from unishard.contract.entries import Entry, Key, KeyEffect, interpret, left_out
from unishard.contract.rules import Fit
from unishard.formats.files.source import Source
from unishard.formats.format import Format
from unishard.formats.launch.processes import Launch
from unishard.formats.lightning import ddp, deepspeed, fsdp, model_parallel
from unishard.formats.lightning.built import CLASS, short
from unishard.formats.lightning.keys import BESIDE, REMOVED, TRAINER, counted
from unishard.formats.lightning.plugins import precision_in
from unishard.formats.lightning.rows import ELSEWHERE, TOOL
from unishard.formats.lightning.shape import Shape
from unishard.formats.lightning.strategy import Strategy, strategy_in
from unishard.formats.markers import Coverage, by_entries
from unishard.formats.reading.document import ReadDocument

_OWN = left_out("LightningCLI hands it to a class of your training script")._replace(beyond_fields=True)


class LightningFormat(Format):
    """The arguments of the Trainer or of Fabric, of the strategy, and LightningCLI's keys around them."""

    name = "lightning"
    tool = TOOL
    instead = "train with unishard.integrations.lightning or the unishard file"
    keys: Mapping[str, Key] = {**TRAINER, **REMOVED, **BESIDE}

    def ranks(self, source: Source) -> Topology | None:
        """Those that the Trainer's `devices` and `num_nodes` say; None where they leave it open."""
        trainer = Shape.of(source.data, self.keys).arguments
        devices, nodes = counted(trainer.get("devices")), counted(trainer.get("num_nodes", 1))
        return Topology(world_size=devices * nodes, local_world_size=devices) if devices and nodes else None

    def entries(self, source: Source, topology: Topology | None) -> Sequence[Entry]:
        """What each key says, in the order strategy, Trainer, the rest."""
        shape = Shape.of(source.data, self.keys)
        strategy, entries = strategy_in(shape, topology)
        trainer = list(_trainer(shape, strategy, topology))
        if strategy:
            precision = next(entry for entry in trainer if entry.path[-1] == "precision")
            if strategy.runs == "DeepSpeedStrategy":
                trainer.remove(precision)
                entries += deepspeed.entries_of(strategy, precision, source.folder)
            else:
                entries += _READERS[strategy.runs](strategy)
        return [_without_hydra(entry) for entry in (*_clipped_once(entries, trainer), *_beside(shape, topology))]

    def coverage(self, source: Source) -> Coverage:
        """How many of the Trainer's arguments are known; sections beside them are the user's own classes."""
        return by_entries(entry for entry in self.entries(source, self.ranks(source)) if entry.effect != _OWN)

    def launch(self, reading: ReadDocument) -> Launch:
        """Devices and nodes of the Trainer; Lightning starts the processes of one node itself."""
        ranks = reading.topology
        return (
            Launch(ranks.world_size // ranks.local_world_size, ranks.local_world_size)
            if ranks and ranks.world_size > 1
            else Launch()
        )


FORMAT = LightningFormat()

_READERS = {
    "DDPStrategy": ddp.entries_of,
    "FSDPStrategy": fsdp.entries_of,
    "ModelParallelStrategy": model_parallel.entries_of,
}


def _trainer(shape: Shape, strategy: Strategy | None, topology: Topology | None) -> Iterator[Entry]:
    runs = strategy.runs if strategy else ""
    own = fsdp.own_formats(strategy) if strategy and runs == "FSDPStrategy" else ""
    arguments = {**shape.arguments, "strategy": f"{runs} {own}" if own else runs}
    rows = {**TRAINER, **REMOVED, "strategy": ELSEWHERE}
    rows |= BESIDE if shape.trainer == shape.top else {}
    rows |= {} if shape.bare else {CLASS: Key(_trainer_class)}
    defaults = precision_in(arguments.get("plugins"))
    for entry in interpret(rows, arguments, tool=TOOL, defaults=defaults, topology=topology):
        if entry.path[0] != "strategy":
            yield entry.at(*shape.trainer, *entry.path)


def _trainer_class(value: Any, document: Any) -> KeyEffect:
    if short(value) not in ("Trainer", "Fabric"):
        note = f"is no Trainer of Lightning: {value}; name the strategy's class, or the Trainer"
        return KeyEffect(Fit.UNSUPPORTED, note)
    return left_out("names the Trainer")


def _beside(shape: Shape, topology: Topology | None) -> Iterator[Entry]:
    """LightningCLI's other keys; those that it does not have are arguments of the user's own classes."""
    for path, value in shape.beside.items():
        if path[-1] in BESIDE and path[:-1] == shape.top:
            yield from (
                entry.at(*path[:-1], *entry.path)
                for entry in interpret(BESIDE, {path[-1]: value}, tool=TOOL, topology=topology)
            )
        else:
            yield Entry(path, value, _OWN)


_HYDRA = "_target_"
_BUILT_BY_HYDRA = f"{_HYDRA} of Hydra is not read; write class_path and init_args, or remove it"


def _without_hydra(entry: Entry) -> Entry:
    """The entry, refused where Hydra would build what it names and that counts."""
    if entry.effect.fit is Fit.IGNORED or not (_HYDRA in entry.path or _names(entry.value)):
        return entry
    return entry.but(Fit.UNSUPPORTED, _BUILT_BY_HYDRA)


def _names(value: Any) -> bool:
    """Whether a value names a class as Hydra does, or holds one that does."""
    match value:
        case Mapping():
            return _HYDRA in value or any(map(_names, value.values()))
        case list():
            return any(map(_names, value))
    return False


_OVERRULED = "not used: Lightning sets it only in a DeepSpeed config without gradient_clipping"
_CLIPS = ("gradient_clip_val", "gradient_clip_algorithm")


def _clipped_once(strategy: list[Entry], trainer: Iterable[Entry]) -> Iterator[Entry]:
    """A DeepSpeed config's own clipping counts, and the Trainer's does not."""
    own = any(entry.path[-1] == "gradient_clipping" and not entry.assumed for entry in strategy)
    yield from strategy
    for entry in trainer:
        if not own or entry.path[-1] not in _CLIPS:
            yield entry
        elif not entry.assumed:
            yield entry._replace(effect=KeyEffect(Fit.IGNORED, _OVERRULED))
