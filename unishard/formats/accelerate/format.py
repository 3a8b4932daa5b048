"""Reads and writes the files of `accelerate config`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from unishard.config.describe import shown
from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.contract.entries import Entry, KeyEffect, Path, Unreadable, interpret
from unishard.contract.key_rows import integer, listed
from unishard.contract.render import RenderedDocument
from unishard.contract.rules import Fit
from unishard.formats.accelerate.deepspeed import NO_FILE, deepspeed_entries, file_entries
from unishard.formats.accelerate.entries import KINDS, NO_WORDS, TOOL, block_of, dropped, kind_of, precision_of, refused
from unishard.formats.accelerate.fsdp import CLASSES, fsdp_entries, version_of
from unishard.formats.accelerate.keys import KEYS
from unishard.formats.accelerate.rules import FSDP_RULES
from unishard.formats.accelerate.script import launch_of
from unishard.formats.accelerate.sequence import around
from unishard.formats.accelerate.writing import expressed, for_trainer, text_of
from unishard.formats.engines.block import SourceKey
from unishard.formats.files.source import Source
from unishard.formats.format import Format
from unishard.formats.launch.processes import Launch
from unishard.formats.names import names
from unishard.formats.reading.document import ReadDocument

_BLOCK, _FILE = "deepspeed_config", "deepspeed_config_file"
_BLOCKS = {"fsdp_config": "FSDP", _BLOCK: "DEEPSPEED"}
_COPIED = names(
    "mixed_precision num_processes num_machines machine_rank main_process_ip main_process_port rdzv_backend gpu_ids "
    "dynamo_backend use_cpu enable_cpu_affinity same_network main_training_function downcast_bf16 debug"
)
"""Arguments of `accelerate launch` that a file also says."""
_PREFIXED = ("dynamo_config", "fp8_config")
"""Blocks whose keys Accelerate also takes without their prefix."""
_SIZES = ("parallelism_config_dp_replicate_size", "parallelism_config_dp_shard_size")
_FP8 = "fp8 is not supported: matrix products run in bf16; slower, and closer to fp32"
_AUTOCAST = "torch.autocast keeps some operations in fp32; without it all run in this dtype"


def ranks_of(document: Mapping[str, Any]) -> Topology | None:
    """The ranks that a document speaks of; None where it does not say."""
    try:
        ranks = integer(1)(document.get("num_processes", 1 if document.get("distributed_type") in NO_WORDS else None))
        machines = integer(1)(document.get("num_machines") or 1)
    except Unreadable:
        return None
    return Topology(ranks, ranks // machines) if ranks % machines == 0 else None


def entries_of(source: Source, topology: Topology | None) -> list[Entry]:
    """What a document says, one entry for each of its keys, in its order, and one for each default that must be said.

    Args:
        source: The document.
        topology: The ranks, where they are known.
    """
    written, source = source.data, _as_launched(source)
    document, inner = source.data, _launched(written)
    own = list(_tool_entries(document, topology))
    refused_already = {entry.path for entry in own}
    engine = [entry for entry in _engine(source, topology) if entry.path not in refused_already]
    entries = [*own, *engine, *_unused(document)]
    paths = {entry.path for entry in entries if not entry.assumed}
    entries = [_quoted(entry) for entry in entries if not (entry.assumed and entry.path in paths)]
    entries = [entry.at(_BLOCK, *entry.path) if entry.path[0] in inner else entry for entry in entries]
    entries += [dropped((name,), written[name], f"{_BLOCK}.{name} counts instead") for name in inner if name in written]
    order = {str(name): place for place, name in enumerate(document)}
    return sorted(entries, key=lambda entry: (entry.assumed, order.get(entry.path[0], len(order))))


def _launched(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments of the launcher in DeepSpeed's block, each of whose keys it copies over its own (commands/launch.py,
    _validate_launch_command).
    """
    block = block_of(document, _BLOCK)
    return {name: value for name, value in block.items() if name in _COPIED and value is not None}


def _as_launched(source: Source) -> Source:
    """The file as the launcher takes it."""
    inner = _launched(source.data)
    if not inner:
        return source
    block = {name: value for name, value in block_of(source.data, _BLOCK).items() if name not in inner}
    return source._replace(data={**source.data, **inner, _BLOCK: block})


def _quoted(entry: Entry) -> Entry:
    """The entry; a bare `no` of YAML 1.1, which is false, is written anew: Accelerate fails at it."""
    fails = entry.path == ("mixed_precision",) and entry.value is False
    return entry._replace(effect=entry.effect._replace(rejected_upstream=True)) if fails else entry


def _tool_entries(document: Mapping[str, Any], topology: Topology | None) -> Iterator[Entry]:
    """The keys that are no engine's arguments."""
    own = {name: value for name, value in document.items() if name not in _BLOCKS}
    groups = block_of(document, "parallelism_config")
    if groups:
        rest = {name: value for name, value in groups.items() if name not in _SIZES}
        own = {name: value for name, value in own.items() if name != "parallelism_config"}
        own |= {"parallelism_config": rest} if rest else {}
    for name in _PREFIXED:
        if block := block_of(document, name):
            own[name] = {_prefixed(name, key): value for key, value in block.items()}
    others = around(document, version_of(document))
    for entry in interpret(
        KEYS, own, tool=TOOL, ignores_unknown=lambda key: "." in key, defaults=others, topology=topology
    ):
        if entry.effect.fit in (Fit.UNSUPPORTED, Fit.NEEDS_INPUT) or entry.path != _precision_key(document).path:
            yield from (_replaced(entry, document) for entry in _renamed(entry, document))
    if "distributed_type" not in document:
        held = next((kind for name, kind in _BLOCKS.items() if document.get(name)), "MULTI_GPU")
        yield refused(
            ("distributed_type",),
            None,
            f"is missing, and {TOOL} needs it; write distributed_type: {held}",
            assumed=True,
        )


def _replaced(entry: Entry, document: Mapping[str, Any]) -> Entry:
    """The same, if the old key does not take its place."""
    if entry.path[0] == "dynamo_config" and "dynamo_backend" in document:
        return dropped(
            entry.path, entry.value, "dynamo_backend, the old key, replaces the full block", copy_verbatim=False
        )
    return entry


def _prefixed(block: str, name: Any) -> str:
    """A key under its name in the table.

    Accelerate adds the block's prefix where it is missing; the table has it only for `dynamo_`.
    """
    if block == "dynamo_config":
        return str(name) if str(name).startswith("dynamo_") else f"dynamo_{name}"
    return str(name) if name == "fp8_format" else str(name).removeprefix("fp8_")


def _renamed(entry: Entry, document: Mapping[str, Any]) -> Iterator[Entry]:
    """The same under the name that the document has; the last of two names for one key counts."""
    block = entry.path[0]
    if block not in _PREFIXED or len(entry.path) == 1:
        yield entry
        return
    written = block_of(document, block)
    *before, last = (name for name in written if _prefixed(block, name) == entry.path[1])
    if entry.path[2:3] in ((), _first(written[last])):
        for name in before:
            yield dropped(
                (block, str(name)), written[name], f"is repeated by {last}, which takes precedence", copy_verbatim=False
            )
    yield entry.at(block, str(last), *entry.path[2:])


def _first(value: Any) -> tuple[str, ...]:
    """The first key of a mapping, at which one speaks of the whole once."""
    return (str(next(iter(value))),) if isinstance(value, Mapping) and value else ()


def _engine(source: Source, topology: Topology | None) -> list[Entry]:
    """What the engine's arguments say, with the format that it computes in."""
    kind, precision, source_key = kind_of(source.data), precision_of(source.data), _precision_key(source.data)
    engine_entries = _ENGINES[kind.engine](source, precision, source_key, topology)
    unsaid = all(entry.path != source_key.path for entry in engine_entries)
    return [*engine_entries, *_precision_entries(source_key, precision, kind.engine)] if unsaid else engine_entries


def _precision_key(document: Mapping[str, Any]) -> SourceKey:
    """Where a document says in which format it computes."""
    name = "fp16" if "mixed_precision" not in document and "fp16" in document else "mixed_precision"
    note, fit = (_FP8, Fit.APPROXIMATE) if precision_of(document) == "fp8" else ("", Fit.EXACT)
    fields = {} if precision_of(document) == "no" else {"precision.master": "fp32"}
    return SourceKey((name,), document.get(name, "no"), name not in document, fit, note, fields)


def _precision_entries(source_key: SourceKey, precision: str, engine: str) -> Iterator[Entry]:
    """The format where the engine itself says nothing of it."""
    if precision == "no":
        yield Entry(
            source_key.path, source_key.value, KeyEffect(fields={"precision.compute": "fp32"}), source_key.assumed
        )
    elif engine == "none":
        fields = {
            "precision.compute": "bf16" if precision == "fp8" else precision,
            "precision.master": "fp32",
            "precision.reduce": "fp32",
        }
        note = "; ".join(filter(None, (_AUTOCAST, source_key.note)))
        yield Entry(source_key.path, source_key.value, KeyEffect(Fit.APPROXIMATE, note, fields), source_key.assumed)


def _replicas(source: Source, precision: str, source_key: SourceKey, topology: Topology | None) -> list[Entry]:
    """Replicas have no engine's arguments; groups of ranks are only another number of replicas."""
    block = block_of(source.data, "parallelism_config")
    return [
        dropped(("parallelism_config", name), block[name], "without FSDP every rank is a replica", copy_verbatim=False)
        for name in _SIZES
        if name in block
    ]


def _deepspeed(source: Source, precision: str, source_key: SourceKey, topology: Topology | None) -> list[Entry]:
    groups = _replicas(source, precision, source_key, topology)
    if block_of(source.data, "deepspeed_config").get("deepspeed_config_file") not in NO_FILE:
        return [*file_entries(source, source_key, topology), *groups]
    return [*deepspeed_entries(source.data, precision, source_key, topology), *groups]


_ENGINES: Mapping[str, Callable[[Source, str, SourceKey, Topology | None], list[Entry]]] = {
    "fsdp": (
        lambda source, precision, source_key, topology: fsdp_entries(source.data, precision, source_key, topology)
    ),
    "deepspeed": _deepspeed,
    "none": _replicas,
}


def _unused(document: Mapping[str, Any]) -> Iterator[Entry]:
    """Blocks of another engine, which Accelerate does not look at, and blocks that are none."""
    for name, kind in _BLOCKS.items():
        if name not in document:
            continue
        value = document[name]
        if value is None or value == {}:
            yield dropped((name,), value, "is empty")
        elif not isinstance(value, Mapping):
            yield refused((name,), value, f"must be a mapping of keys to values, got {shown(value)}; {_INSTEAD[name]}")
        elif kind_of(document) is not KINDS[kind]:
            for key, inner in value.items():
                idle = dropped((name, str(key)), inner, f"only used with distributed_type: {kind}")
                yield _with_classes(idle) if key == CLASSES and kind_of(document) is KINDS["DEEPSPEED"] else idle


def _with_classes(idle: Entry) -> Entry:
    """The entry, with the block classes that another engine would gather by."""
    try:
        note = f"{idle.effect.note}; ZeRO gathers parameter by parameter: the same math"
        return idle._replace(effect=KeyEffect(Fit.EQUIVALENT, note, {"sharding.units": listed(idle.value)}))
    except Unreadable:
        return idle


_INSTEAD = {
    "fsdp_config": "write fsdp_version: 2 below it",
    "deepspeed_config": "write deepspeed_config_file: and the name of DeepSpeed's file below it",
}


class AccelerateFormat(Format):
    """Files of `accelerate config`."""

    name = "accelerate"
    tool = TOOL
    keys = KEYS
    rules = FSDP_RULES
    fills_auto = True

    def ranks(self, source: Source) -> Topology | None:
        """Processes and machines that the file names."""
        return ranks_of(_as_launched(source).data)

    def launch(self, reading: ReadDocument) -> Launch:
        """Processes, machines, ports and GPUs that the file names."""
        return launch_of(_as_launched(reading.source).data, reading.topology)

    def for_trainer(self, source: Source) -> tuple[Mapping[str, Any], Path | None]:
        """What its launcher hands to the Trainer."""
        return for_trainer(_as_launched(source))

    def entries(self, source: Source, topology: Topology | None) -> Sequence[Entry]:
        """What a file says. Opens the file that `deepspeed_config_file` names."""
        return entries_of(source, topology)

    def write(self, reading: ReadDocument, topology: Topology) -> RenderedDocument:
        """A file for `accelerate launch --config_file`, and what became of each field.

        What the source leaves to its training script stays with it.

        Raises:
            ConfigError: Accelerate does not know the engine.
        """
        return expressed(reading, topology)

    def wants(self, document: Native) -> str:
        """The number of processes, without which `accelerate launch` refuses a file with an engine."""
        return "" if "num_processes" in document or document.get("distributed_type") in NO_WORDS else _NO_RANKS

    def render(self, document: Native, reading: ReadDocument) -> str:
        """YAML in the order of `accelerate config`."""
        return text_of(document)


FORMAT = AccelerateFormat()

_NO_RANKS = (
    "accelerate launch refuses a file without num_processes; add --world-size N, or start it with "
    "`accelerate launch --num_processes N --config_file FILE`"
)
