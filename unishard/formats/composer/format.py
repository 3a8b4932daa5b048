"""Reads YAML of llm-foundry, also as the `parameters` of a MosaicML run file and in Composer's older shapes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from unishard.config.topology import Topology
from unishard.contract.entries import Entry, Key, KeyEffect, Path, interpret
from unishard.contract.key_rows import drops, refuses
from unishard.contract.render import AUTO
from unishard.contract.rules import Fit
from unishard.errors import ConfigError, Problem
from unishard.formats.composer.fsdp_keys import ARGUMENTS, DEEPSPEED, engine, trains
from unishard.formats.composer.keys import KEYS, RUN, deferred
from unishard.formats.composer.optimization_keys import defaults_of
from unishard.formats.engine_block import Spot, combined
from unishard.formats.format import Format
from unishard.formats.source import Source
from unishard.formats.undecided import open_end

_NAME = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
_DEEP = 16
"""Interpolations within interpolations that are followed; a circle ends here and stays text."""


def resolved(value: Any, root: Mapping[str, Any], depth: int = 0) -> Any:
    """A value with the interpolations in it replaced by what `root` holds."""
    if isinstance(value, Mapping):
        return {key: resolved(item, root, depth) for key, item in value.items()}
    if isinstance(value, list):
        return [resolved(item, root, depth) for item in value]
    if not isinstance(value, str) or depth > _DEEP:
        return value
    whole = _NAME.fullmatch(value)
    if whole:
        found = _at(root, whole.group(1))
        return value if found is None else resolved(found, root, depth + 1)
    return _NAME.sub(lambda match: _inline(match, root, depth), value)


def named(value: Any) -> set[str]:
    """The top-level keys that the interpolations in a value name."""
    if isinstance(value, Mapping):
        return {name for item in value.values() for name in named(item)}
    if isinstance(value, list):
        return {name for item in value for name in named(item)}
    return {name.partition(".")[0] for name in _NAME.findall(value)} if isinstance(value, str) else set()


def _inline(match: re.Match[str], root: Mapping[str, Any], depth: int) -> str:
    found = _at(root, match.group(1))
    whole = match.group()
    return whole if found is None or isinstance(found, Mapping | list) else str(resolved(found, root, depth + 1))


def _at(root: Mapping[str, Any], name: str) -> Any:
    value: Any = root
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def current_keys(data: Mapping[str, Any]) -> tuple[dict[str, Any], dict[Path, Path]]:
    """The file in today's shape, and where what was moved came from: prefix by prefix."""
    shaped: dict[str, Any] = dict(data)
    places: dict[Path, Path] = {}
    parallel = shaped.get("parallelism_config")
    if isinstance(parallel, Mapping) and isinstance(parallel.get("fsdp"), Mapping) and "fsdp_config" not in shaped:
        rest = dict(shaped.pop("parallelism_config"))
        shaped["fsdp_config"] = rest.pop("fsdp")
        places[("fsdp_config",)] = ("parallelism_config", "fsdp")
        if rest:
            shaped["parallelism_config"] = rest
    for old, new in (
        ("optimizers", "optimizer"),
        ("schedulers", "scheduler"),
        ("optimizer", "optimizer"),
        ("scheduler", "scheduler"),
    ):
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


def placed(entry: Entry, written: Mapping[str, Any], places: Mapping[Path, Path]) -> Entry:
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
    return Entry(path, shown, entry.effect, entry.assumed)


def together(entries: list[Entry], written: Mapping[str, Any]) -> list[Entry]:
    """One entry for each list, such as the older `schedulers`, since a list is one value."""
    lists = {
        name: [entry for entry in entries if entry.path[0] == name and entry.path[1:] and not entry.assumed]
        for name in written
    }
    for name, parts in lists.items():
        if parts and isinstance(written[name], list):
            entries = [
                combined(Spot((name,), written[name]), [part.effect for part in parts]),
                *(entry for entry in entries if entry not in parts),
            ]
    return entries


_TOOL = "Composer 0.32 with llm-foundry 0.22"
_WHOLE = ("global_train_batch_size", "train_batch_size")
_ACCUMULATION = ("device_train_grad_accum", "grad_accum")
_NODE = 8
"""GPUs of one of MosaicML's nodes."""


class ComposerFormat(Format):
    """YAML of llm-foundry."""

    name = "composer"
    tool = _TOOL
    keys = KEYS

    def ranks(self, source: Source) -> Topology | None:
        """Those that a run file asks for."""
        return _ranks(source.data) if _is_run(source) else None

    def entries(self, source: Source, topology: Topology | None) -> Sequence[Entry]:
        """What the file says; the engine is FSDP, or DeepSpeed where an older file configures it."""
        nested = _is_run(source)
        _refuse_evaluation(source)
        inner: Mapping[str, Any] = source.data["parameters"] if nested else source.data
        around = {key: value for key, value in source.data.items() if key != "parameters"} if nested else {}
        entries = [
            *interpret(RUN, around, tool="MosaicML", ignores_unknown=True),
            *_inner(inner, topology, nested=nested),
        ]
        if nested and not inner:
            entries.append(Entry(("parameters",), inner, KeyEffect(Fit.IGNORED, "is empty")))
        return entries


FORMAT = ComposerFormat()


_EVALUATES = {"icl_tasks", "icl_tasks_str", "models", "eval_gauntlet", "eval_gauntlet_str", "model_gauntlet"}
_TRAINS = {"max_duration", "train_loader", "train_dataset", "optimizer", "optimizers", "scheduler", "schedulers"}


def _refuse_evaluation(source: Source) -> None:
    """Refuse what scripts/eval/eval.py of llm-foundry reads, which trains nothing.

    Raises:
        ConfigError: The document is such a file.
    """
    inner = source.data["parameters"] if _is_run(source) else source.data
    if _EVALUATES & set(inner) and not _TRAINS & set(inner):
        what = "only evaluates models (scripts/eval of llm-foundry) and trains nothing; name the YAML of scripts/train"
        raise ConfigError([Problem("", what, source.name)])


def _is_run(source: Source) -> bool:
    """Whether the training YAML stands below `parameters` of a MosaicML run file."""
    return isinstance(source.data.get("parameters"), Mapping)


def _ranks(around: Mapping[str, Any]) -> Topology | None:
    """The ranks that a run file asks for."""
    compute = around.get("compute")
    gpus = compute.get("gpus") if isinstance(compute, Mapping) else around.get("gpu_num")
    if not isinstance(gpus, int) or isinstance(gpus, bool) or gpus < 1:
        return None
    return Topology(world_size=gpus, local_world_size=min(gpus, _NODE))


def _inner(written: Mapping[str, Any], topology: Topology | None, *, nested: bool) -> list[Entry]:
    """Entries of a training YAML, each at the place where it is written, with the value that is written there."""
    shaped, places = current_keys(resolved(written, written))
    rows = {key: deferred(row) for key, row in KEYS.items()} | dict(_of_this_file(written, shaped))
    found = interpret(rows, _without_engine(shaped), tool=_TOOL, defaults=_defaults(shaped), topology=topology)
    entries = [*found, *engine(shaped, topology), *_default_clipping(shaped), *open_end(found, ("max_duration",))]
    inner = together([placed(entry, written, places) for entry in entries], written)
    if nested:
        inner = [entry.at("parameters", *entry.path) for entry in inner]
    order = {key: number for number, key in enumerate(written)}
    return sorted(inner, key=lambda entry: order.get(entry.path[nested], len(order)))


def _without_engine(shaped: Mapping[str, Any]) -> dict[str, Any]:
    """All that the engine's own table does not read."""
    rest = {key: value for key, value in shaped.items() if key not in (*DEEPSPEED, "fsdp_config")}
    sharded = shaped.get("fsdp_config")
    beside = (
        {key: value for key, value in sharded.items() if key not in ARGUMENTS} if isinstance(sharded, Mapping) else {}
    )
    return rest | {"fsdp_config": beside} if beside else rest


_VARIABLE = drops("holds a value that other keys refer to")
_STRANGE = drops("not a key of Composer; llm-foundry 0.22 takes such keys only below variables", unknown=True)
_ALGORITHM = refuses("changes the training, and only Composer has it; remove it")


def _of_this_file(written: Mapping[str, Any], shaped: Mapping[str, Any]) -> Iterator[tuple[str, Key]]:
    """Rows for names that the file itself makes: variables at the top level, a script's own keys, and algorithms."""
    tops = {key.partition(".")[0] for key in KEYS} | {*DEEPSPEED, "fsdp_config"}
    for key in (str(key) for key in shaped if str(key) not in tops and "." not in str(key)):
        if key in named(written):
            yield key, _VARIABLE
        elif not get_close_matches(key, tops, 1, 0.85):
            yield key, _STRANGE
    algorithms = shaped.get("algorithms")
    for name in algorithms if isinstance(algorithms, Mapping) else ():
        if not any(f"{key}.".startswith(f"algorithms.{name}.") for key in KEYS):
            yield f"algorithms.{name}", _ALGORITHM


def _default_clipping(shaped: Mapping[str, Any]) -> Iterator[Entry]:
    """What Composer does where the file does not speak of clipping: nothing."""
    algorithms = shaped.get("algorithms")
    clips = isinstance(algorithms, Mapping) and "gradient_clipping" in algorithms
    if trains(shaped) and not clips and not any(key in shaped for key in ("grad_clip_norm", *DEEPSPEED)):
        yield Entry(
            ("algorithms", "gradient_clipping"),
            None,
            KeyEffect(fields={"training.gradient_clipping": None}),
            assumed=True,
        )


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
