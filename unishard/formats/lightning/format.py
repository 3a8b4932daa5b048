"""Reads Lightning's arguments from a file, and writes a config as LightningCLI's sections for each of its engines, from
which Python is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from unishard.config import Config, leaves
from unishard.config.nested import Native, flat, merge, nested
from unishard.config.topology import Topology
from unishard.contract import registry
from unishard.contract.entries import Key
from unishard.contract.render import AUTO, KEPT_AUTO, FieldResult, Rendered, render
from unishard.contract.rules import NO_KEY, SCRIPT, Fit, Rule
from unishard.formats.format import Format
from unishard.formats.launching import Launch
from unishard.formats.lightning.keys import BESIDE, OLDER, TRAINER
from unishard.formats.lightning.reading import LightningDocument
from unishard.formats.lightning.recipe_keys import OPTIMIZER
from unishard.formats.lightning.rules import FSDP, strategy
from unishard.formats.lightning.shape import Shape
from unishard.formats.lightning.snippet import snippet
from unishard.formats.lightning.strategy_arguments import TOOL
from unishard.formats.lightning.trainer_rules import MODULE, TRAINING, trainer
from unishard.formats.reading import ReadDocument, assemble
from unishard.formats.same_engine import without_unishards
from unishard.formats.signs import Explained, by_entries
from unishard.formats.source import Source


class LightningFormat(Format):
    """Reads YAML and JSON, writes Python."""

    name = "lightning"
    tool = TOOL
    suffix = ".py"
    keys: Mapping[str, Key] = {
        **TRAINER,
        **OLDER,
        **BESIDE,
        **{f"optimizer.init_args.{name}": row for name, row in OPTIMIZER.items()},
    }
    rules = FSDP

    def read(self, source: Source, overrides: Iterable[str] = (), topology: Topology | None = None) -> ReadDocument:
        """What the arguments say: those of the Trainer or of Fabric, of the strategy, and LightningCLI's keys around
        them.

        Raises:
            ConfigError: An override cannot be used.
        """
        document, changes = LightningDocument.of(source, topology), tuple(overrides)
        entries = document.entries()
        if any(change.partition("=")[0].strip() == "backend" for change in changes):
            entries = [document.without_its_class(entry) for entry in entries]
        return assemble(self.name, source, entries, overrides=changes, topology=document.topology)

    def explained(self, source: Source) -> Explained:
        """How many of the Trainer's arguments are known; sections beside them are the user's own classes."""
        document = LightningDocument.of(source, None)
        return by_entries(entry for entry in document.entries() if document.speaks_for_lightning(entry))

    def launch(self, reading: ReadDocument) -> Launch:
        """Devices and nodes of the Trainer; Lightning starts the processes of one node itself."""
        ranks = reading.topology
        return (
            Launch(ranks.world_size // ranks.local_world_size, ranks.local_world_size)
            if ranks and ranks.world_size > 1
            else Launch()
        )

    def write(self, reading: ReadDocument, topology: Topology) -> Rendered:
        """LightningCLI's sections, from which the Python is rendered."""
        return expressed(reading, topology)

    def render(self, document: Native, reading: ReadDocument) -> str:
        """Python: the strategy, the Trainer, and what must be mixed into the LightningModule."""
        return snippet(document, reading)


FORMAT = LightningFormat()


_ALWAYS = ("backend", "sharding", "precision", "offload", "native")
"""What a strategy says of itself, whether the source decides it or the defaults hold."""
_RECIPE = ("optimizer", "scheduler")
_CARRIED = ("gradient_accumulation_steps", "gradient_clipping", "train_batch_size")
"""Keys of a DeepSpeed config that Lightning takes as the Trainer's arguments, or makes of them."""


def expressed(reading: ReadDocument, topology: Topology) -> Rendered:
    """The sections, and what became of each field. In the shape of the source where that is Lightning's as well."""
    write = _WRITERS.get(reading.config.backend, _nothing)
    document, words = write(reading, topology)
    if topology.world_size > 1 and reading.format != "lightning" and document:
        document = merge(_launch(topology), document)
    if reading.format == "lightning":
        document = _shaped(document, Shape.of(reading.source.data))
    return Rendered(document, words)


def _launch(topology: Topology) -> Native:
    nodes = max(topology.world_size // topology.local_world_size, 1)
    return trainer(accelerator="gpu", devices=topology.local_world_size, num_nodes=nodes)


def _decided_rows(reading: ReadDocument, rows: Mapping[str, Rule]) -> Mapping[str, Rule]:
    """The rows of what the source decides; the others write nothing, so that Lightning's own defaults hold."""
    return {
        path: row
        if path in reading.decided or path.partition(".")[0] in _ALWAYS
        else row._replace(to=lambda cfg, topology: {})
        for path, row in rows.items()
    }


def _fsdp(reading: ReadDocument, topology: Topology) -> Rendered:
    found = render(_decided_rows(reading, FSDP), reading.config, topology, reading.undecided.keys())
    size = reading.config.sharding.group_size
    if size and topology.world_size % size:
        found = Rendered(
            found.document,
            {**found.fields, "sharding.group_size": FieldResult(Fit.NEEDS_INPUT, "device_mesh", _MESH.format(size))},
        )
    return found


_MOVED: Mapping[str, Rule] = {
    **{
        path: TRAINING[path]
        for path in ("training.gradient_accumulation_steps", "training.gradient_clipping", "training.seed")
    },
    **{path: row for path, row in FSDP.items() if path.startswith(("checkpoint.", "launch.", "logging.", "profile."))},
}
"""Rows of the Trainer's arguments, which hold beside every strategy."""
_MESH = "write device_mesh=(replicas, {0}), the product is the ranks; or add --world-size"
_FULL = "32-true"
_CONFIG = "config of DeepSpeedStrategy"


def _deepspeed(reading: ReadDocument, topology: Topology) -> Rendered:
    open_ = frozenset(
        path for path, _ in leaves(Config) if path not in reading.decided and path.partition(".")[0] not in _ALWAYS
    )
    undecided = open_ | reading.undecided.keys()
    engine = registry.arguments("deepspeed").write(reading.config, topology, undecided)
    rows = _decided_rows(reading, _MOVED)
    around = render(rows, reading.config, topology, reading.undecided.keys())
    asked = registry.arguments("deepspeed").write(reading.config, topology, reading.undecided.keys()).document
    own = without_unishards(engine.document, reading)
    config = _without_auto({key: value for key, value in own.items() if key not in _CARRIED}, keep=_open(asked))
    document = merge(merge(around.document, trainer(precision=_word(config))), strategy("deepspeed", config=config))
    words = {path: _inside(word, path) for path, word in engine.fields.items()} | {
        path: around.fields[path] for path in _MOVED
    }
    return Rendered(document, words)


def _open(config: Mapping[str, Any]) -> frozenset[str]:
    """Keys of the optimizer and the schedule whose value only the script knows: left out, they would be DeepSpeed's
    defaults.
    """
    return frozenset(key for key, value in flat(config) if value == AUTO and key.partition(".")[0] in _RECIPE)


def _without_auto(config: Mapping[str, Any], keep: frozenset[str]) -> Native:
    """The config without "auto", which Lightning does not fill in: what it finds absent it takes from the Trainer and
    the loader.
    """
    absent = {name for name in _RECIPE if isinstance(config.get(name), Mapping) and config[name].get("type") == AUTO}
    settings = [(key, value) for key, value in flat(config) if key.partition(".")[0] not in absent]
    return nested({key: value for key, value in settings if value != AUTO or key in keep})


def _inside(word: FieldResult, path: str) -> FieldResult:
    if word.note == KEPT_AUTO:
        if path.partition(".")[0] in _RECIPE:
            return FieldResult(
                Fit.NEEDS_INPUT,
                f"{_CONFIG}: {word.key}",
                'kept as "auto", which Lightning does not fill in; write the value',
            )
        if path.startswith("precision."):
            return FieldResult(
                Fit.NEEDS_INPUT, "trainer.precision", f"{_FULL} here, as nothing else is known; write the precision"
            )
        return FieldResult(Fit.EXACT, SCRIPT, "still left to the tool's default")
    if not word.key or word.key in (SCRIPT, MODULE, NO_KEY):
        return word
    return word._replace(key=f"{_CONFIG}: {word.key}")


def _word(config: Mapping[str, Any]) -> str:
    """The Trainer's precision, which casts the inputs and the model to the format of the config's block."""
    enabled = [name for name in ("fp16", "bf16") if str((config.get(name) or {}).get("enabled", "")).lower() == "true"]
    return {"fp16": "16-mixed", "bf16": "bf16-mixed"}[enabled[0]] if enabled else _FULL


def _nothing(reading: ReadDocument, topology: Topology) -> Rendered:
    note = f"Lightning has no backend {reading.config.backend}; add --set backend=fsdp or backend=deepspeed"
    return Rendered({}, {path: FieldResult(Fit.UNSUPPORTED, NO_KEY, note) for path, _ in leaves(Config)})


def _shaped(document: Native, shape: Shape) -> Native:
    """The sections where the source has them."""
    arguments = dict(document.get("trainer", {}))
    rest = {key: value for key, value in document.items() if key != "trainer"}
    if shape.bare:
        built = arguments.pop("strategy", {})
        section: Native = {**built, **arguments}
    else:
        section = arguments
    for name in reversed(shape.trainer[len(shape.top) :]):
        section = {name: section}
    whole = merge(rest, section)
    for name in reversed(shape.top):
        whole = {name: whole}
    return whole


_WRITERS: Mapping[str, Callable[[ReadDocument, Topology], Rendered]] = {"fsdp": _fsdp, "deepspeed": _deepspeed}
