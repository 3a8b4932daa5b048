"""Reads and writes YAML of llm-foundry, also as the `parameters` of a MosaicML run file and in Composer's older shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from io import StringIO
from typing import Any

from ruamel.yaml import YAML

from unishard import registry
from unishard.formats.composer.expressions import EXPRESSIONS
from unishard.formats.composer.fsdp_keys import ARGUMENTS
from unishard.formats.composer.interpolation import named, resolved
from unishard.formats.composer.keys import KEYS, RUN, deferred
from unishard.formats.composer.optimization_keys import defaults_of
from unishard.formats.reading import Reading, assemble
from unishard.formats.schedules import open_end
from unishard.formats.source import Source
from unishard.keys import drops, refuses
from unishard.meanings import AUTO, Entry, Expressed, Expression, Key, Meaning, Path, Verdict, Word, express, interpret
from unishard.rules import Native
from unishard.topology import Topology

__all__ = ["ComposerFormat"]

_TOOL = "Composer 0.32 with llm-foundry 0.22"
_FSDP: Path = ("fsdp_config",)
_DEEPSPEED = ("deepspeed_config", "deepspeed")
_WHOLE = ("global_train_batch_size", "train_batch_size")
_ACCUMULATION = ("device_train_grad_accum", "grad_accum")
_MICRO = "training.micro_batch_size"
_NODE = 8
"""GPUs of one of MosaicML's nodes."""


class ComposerFormat:
    """Implements `unishard.formats.format.Format`."""

    name = "composer"
    tool = _TOOL
    suffix = ".yaml"
    keys: Mapping[str, Key] = KEYS
    expressions: Mapping[str, Expression] = EXPRESSIONS

    def read(self, source: Source, overrides: Iterable[str] = (), topology: Topology | None = None) -> Reading:
        """What the file says; the engine is FSDP, or DeepSpeed where an older file configures it.

        Raises:
            ConfigError: An override cannot be used.
        """
        nested = isinstance(source.data.get("parameters"), Mapping)
        inner: Mapping[str, Any] = source.data["parameters"] if nested else source.data
        around = {key: value for key, value in source.data.items() if key != "parameters"} if nested else {}
        topology = topology or _ranks(around)
        entries = [*interpret(RUN, around, tool="MosaicML", ignores_unknown=True), *_inner(inner, topology, nested=nested)]
        return assemble(self.name, source, entries, overrides=overrides, topology=topology)

    def write(self, reading: Reading, topology: Topology) -> Expressed:
        """The fields that the source decides; below `parameters` where it was a run file of MosaicML itself."""
        rows = {path: row for path, row in EXPRESSIONS.items() if path in reading.decided or path == "backend"}
        expressed = _automatic(express(rows, reading.config, topology, reading.undecided), reading)
        if reading.format == self.name and isinstance(reading.source.data.get("parameters"), Mapping):
            return Expressed({"parameters": expressed.document}, expressed.words)
        return expressed

    def render(self, document: Native, reading: Reading) -> str:
        """YAML."""
        yaml = YAML()
        yaml.width = 140
        out = StringIO()
        yaml.dump(document, out)
        return out.getvalue()


def _automatic(expressed: Expressed, reading: Reading) -> Expressed:
    """Composer itself finds the size of a micro-batch that is left open."""
    if _MICRO not in reading.undecided:
        return expressed
    word = Word(Verdict.EMULATED, "device_train_microbatch_size", "Composer takes what fits into memory; the samples of an update stay")
    return expressed._replace(words={**expressed.words, _MICRO: word})


def _ranks(around: Mapping[str, Any]) -> Topology | None:
    """The ranks that a run file asks for."""
    compute = around.get("compute")
    gpus = compute.get("gpus") if isinstance(compute, Mapping) else around.get("gpu_num")
    if not isinstance(gpus, int) or isinstance(gpus, bool) or gpus < 1:
        return None
    return Topology(world_size=gpus, local_world_size=min(gpus, _NODE))


def _inner(written: Mapping[str, Any], topology: Topology | None, *, nested: bool) -> list[Entry]:
    """Entries of a training YAML, each at the place where it is written, with the value that is written there."""
    shaped, places = _shaped(resolved(written, written))
    sharded = shaped.get("fsdp_config")
    rest = {key: value for key, value in shaped.items() if key not in _DEEPSPEED}
    if isinstance(sharded, Mapping) and sharded:
        rest["fsdp_config"] = {key: value for key, value in sharded.items() if key not in ARGUMENTS}
    elif "fsdp_config" in rest and not isinstance(sharded, Mapping):
        rest.pop("fsdp_config")
    if rest.get("fsdp_config") == {}:
        rest.pop("fsdp_config")
    rows = {key: deferred(row) for key, row in KEYS.items()} | dict(_of_this_file(written, shaped))
    defaults = _defaults(shaped)
    found = interpret(rows, rest, tool=_TOOL, defaults=defaults, topology=topology)
    entries = [*found, *_engine(shaped, topology), *_silence(shaped), *open_end(found, ("max_duration",))]
    placed = [_placed(entry, written, places, ("parameters",) if nested else ()) for entry in entries]
    order = {key: number for number, key in enumerate(written)}
    return sorted(placed, key=lambda entry: order.get(entry.path[nested], len(order)))


_VARIABLE = drops("holds a value that other keys name")
_ALGORITHM = refuses("unishard has no such algorithm, which changes the training; remove it")


def _of_this_file(written: Mapping[str, Any], shaped: Mapping[str, Any]) -> Iterator[tuple[str, Key]]:
    """Rows for names that the file itself makes: variables at the top level, and algorithms."""
    for key in named(written):
        if key in written and key not in KEYS:
            yield key, _VARIABLE
    algorithms = shaped.get("algorithms")
    for name in algorithms if isinstance(algorithms, Mapping) else ():
        if not any(f"{key}.".startswith(f"algorithms.{name}.") for key in KEYS):
            yield f"algorithms.{name}", _ALGORITHM


def _silence(shaped: Mapping[str, Any]) -> Iterator[Entry]:
    """What Composer does where the file does not speak of clipping: nothing."""
    algorithms = shaped.get("algorithms")
    clips = isinstance(algorithms, Mapping) and "gradient_clipping" in algorithms
    if _trains(shaped) and not clips and not any(key in shaped for key in ("grad_clip_norm", *_DEEPSPEED)):
        yield Entry(("algorithms", "gradient_clipping"), None, Meaning(fields={"training.gradient_clipping": None}), assumed=True)


def _defaults(shaped: Mapping[str, Any]) -> dict[str, Any]:
    defaults = defaults_of(shaped.get("optimizer"))
    sharded = shaped.get("fsdp_config")
    if isinstance(sharded, Mapping):
        # The engine's table reads it, and the rows beside it ask for it.
        defaults["fsdp_config.sharding_strategy"] = sharded.get("sharding_strategy")
        defaults["fsdp_config.mixed_precision"] = "DEFAULT"
        defaults["precision"] = "amp_bf16"
    if any(key in shaped for key in _WHOLE) and not any(key in shaped for key in _ACCUMULATION):
        defaults["device_train_microbatch_size"] = AUTO
    return defaults


def _engine(shaped: Mapping[str, Any], topology: Topology | None) -> Iterator[Entry]:
    """What the engine's own table makes of its part of the file."""
    for key in _DEEPSPEED:
        if isinstance(shaped.get(key), Mapping):
            yield Entry((key,), "deepspeed", Meaning(fields={"backend": "deepspeed"}), assumed=True)
            yield from (entry.at(key, *entry.path) for entry in registry.get("deepspeed").parse(shaped[key], topology=topology))
            return
        if key in shaped:
            yield Entry((key,), shaped[key], Meaning(Verdict.DROPPED, "is off"))
    sharded = shaped.get("fsdp_config")
    if not isinstance(sharded, Mapping):
        if _trains(shaped):
            note = "without fsdp_config Composer runs DistributedDataParallel"
            fields = {"backend": "fsdp", "sharding.strategy": "no_shard"}
            yield Entry(_FSDP, sharded, Meaning(Verdict.EXACT, note, fields), assumed="fsdp_config" not in shaped)
        return
    if not sharded:
        yield Entry(_FSDP, sharded, Meaning(Verdict.EXACT, "", {"backend": "fsdp", "sharding.strategy": "full_shard"}))
        return
    names = {own: key for key, own in ARGUMENTS.items() if key in sharded}
    native = {ARGUMENTS[key]: value for key, value in sharded.items() if key in ARGUMENTS}
    version = 2 if "reshard_after_forward" in native and "sharding_strategy" not in native else 1
    for entry in registry.get("fsdp").parse(native, defaults={"version": version}, topology=topology):
        yield entry.at("fsdp_config") if entry.path == ("version",) else entry.at("fsdp_config", names.get(entry.path[0], entry.path[0]))


def _trains(shaped: Mapping[str, Any]) -> bool:
    """Whether the file is for training, and not for evaluation or a benchmark."""
    return any(key in shaped for key in ("optimizer", "max_duration", "global_train_batch_size", "train_loader"))


def _shaped(data: Mapping[str, Any]) -> tuple[dict[str, Any], dict[Path, Path]]:
    """The file in today's shape, and where what was moved came from: prefix by prefix."""
    shaped: dict[str, Any] = dict(data)
    places: dict[Path, Path] = {}
    parallel = shaped.get("parallelism_config")
    if isinstance(parallel, Mapping) and isinstance(parallel.get("fsdp"), Mapping) and "fsdp_config" not in shaped:
        shaped["fsdp_config"] = parallel["fsdp"]
        shaped["parallelism_config"] = {key: value for key, value in parallel.items() if key != "fsdp"}
        places[_FSDP] = ("parallelism_config", "fsdp")
        if not shaped["parallelism_config"]:
            del shaped["parallelism_config"]
    for old, new in (("optimizers", "optimizer"), ("schedulers", "scheduler"), ("optimizer", "optimizer"), ("scheduler", "scheduler")):
        _unwrap(shaped, places, old, new)
    return shaped, places


def _unwrap(shaped: dict[str, Any], places: dict[Path, Path], old: str, new: str) -> None:
    """`optimizers: {decoupled_adamw: {...}}` and `schedulers: [{name: {...}}]` as a mapping with a name."""
    value = shaped.get(old)
    single = value[0] if isinstance(value, list) and len(value) == 1 else value
    if not isinstance(single, Mapping) or len(single) != 1 or (old != new and new in shaped):
        return
    ((name, settings),) = single.items()
    if not isinstance(settings, Mapping):
        return
    at: Path = (old, "0", str(name)) if isinstance(value, list) else (old, str(name))
    shaped.pop(old)
    shaped[new] = {"name": name, **settings}
    places[(new, "name")] = at
    places[(new,)] = at


def _placed(entry: Entry, written: Mapping[str, Any], places: Mapping[Path, Path], above: Path) -> Entry:
    """The entry at the place where the file has it, with the value as it stands there."""
    path = entry.path
    if path in places:
        path = places[path]
    elif path[:1] in places:
        path = (*places[path[:1]], *path[1:])
    value: Any = written
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    shown = entry.value if value is None or entry.assumed or entry.path in places else value
    return Entry((*above, *path), shown, entry.meaning, entry.assumed)
