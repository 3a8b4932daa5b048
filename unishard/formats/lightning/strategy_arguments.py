"""From a strategy's arguments to entries: the engine's own go through its backend, and come back to where they
stand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any, NamedTuple

from unishard.config.topology import Topology
from unishard.contract.entries import Entry, Key, KeyEffect, Path, Unreadable, interpret, left_out
from unishard.contract.rules import Fit
from unishard.errors import ConfigError
from unishard.formats.engine_block import EngineBlock, Spot, combined
from unishard.formats.lightning import deepspeed_arguments, torch_arguments
from unishard.formats.lightning.keys import UNSET, off
from unishard.formats.lightning.precision import precision_section, word_of
from unishard.formats.lightning.shape import Strategy
from unishard.formats.lightning.torch_arguments import DDP, MODEL_PARALLEL
from unishard.formats.source import open_source

TOOL = "Lightning 2.6.6"
_REPLACED = "not used: config replaces every DeepSpeed argument"


class StrategyArguments(NamedTuple):
    """A strategy's arguments, and what stands around them."""

    strategy: Strategy
    named: Entry
    """The name or the class; means nothing yet."""
    arguments: Mapping[str, Any]
    places: Mapping[str, Path]
    base: Path
    """Where an argument would stand that is not written."""
    topology: Topology | None
    folder: FilePath | None
    precision: Entry | None = None
    """The Trainer's precision where the engine takes it as arguments of its own."""
    scaling: Mapping[str, Any] = {}

    def place(self, argument: str) -> Path:
        """Where an argument stands."""
        return self.places.get(argument, (*self.base, argument))

    def of(self, argument: str, effect: KeyEffect) -> Entry:
        """An entry for an argument."""
        return Entry(self.place(argument), self.arguments.get(argument), effect)


def entries_of(given: StrategyArguments) -> list[Entry]:
    """What a strategy and its arguments say."""
    return list(_READERS[given.strategy.runs](given))


def _table(
    keys: Mapping[str, Key], given: StrategyArguments, names: Iterable[str], known: Iterable[str] = ()
) -> Iterator[Entry]:
    """Arguments that only Lightning has; `known` are those of the strategy that others read, for the hint at a misspelt
    one.
    """
    written = {name: given.arguments[name] for name in names}
    rows = {**dict.fromkeys(known, _ELSEWHERE), **keys}
    for entry in interpret(
        rows, {name: _as_one_value(value) for name, value in written.items()}, tool=TOOL, topology=given.topology
    ):
        name = entry.path[0]
        yield entry._replace(path=(*given.place(name), *entry.path[1:]), value=written.get(name, entry.value))


def _as_one_value(value: Any) -> Any:
    """A mapping as one value, so that an unknown argument is named once."""
    return [value] if isinstance(value, Mapping) else value


_ELSEWHERE = Key(lambda value, given: UNSET)


def _ddp(given: StrategyArguments) -> Iterator[Entry]:
    yield given.named._replace(effect=KeyEffect(fields={"sharding.strategy": "no_shard", "backend": "fsdp"}))
    yield from _table(DDP, given, given.arguments)


def _model_parallel(given: StrategyArguments) -> Iterator[Entry]:
    yield given.named._replace(effect=KeyEffect(fields={"backend": "fsdp"}))
    yield from _table(MODEL_PARALLEL, given, given.arguments)


def _fsdp(given: StrategyArguments) -> Iterator[Entry]:
    arguments = {**given.strategy.stands_for, **given.arguments}
    block = EngineBlock("fsdp", given.base, repeats=True)
    for name in [name for name in arguments if name in torch_arguments.ARGUMENTS]:
        try:
            fragment = torch_arguments.ARGUMENTS[name](arguments[name])
        except Unreadable as error:
            yield given.of(name, KeyEffect(Fit.UNSUPPORTED, str(error)))
            continue
        if not fragment:
            yield given.of(name, UNSET)
        for key, value in fragment.items():
            block.add(key, value, *_spots(given, block, name))
    block.spots["version"] = (_named(given, block),)
    defaults = torch_arguments.defaults(fabric=given.strategy.fabric)
    yield from _with_name(given, block, block.entries(defaults=defaults, topology=given.topology))
    rest = [name for name in given.arguments if name not in torch_arguments.ARGUMENTS]
    yield from _table(torch_arguments.OWN, given, rest, torch_arguments.ARGUMENTS)


def _named(given: StrategyArguments, block: EngineBlock) -> Spot:
    """The strategy's name, which says the engine, and what it stands for."""
    named, former = given.named, given.strategy.former
    fields = {"backend": block.engine}
    if former:
        return Spot(
            named.path,
            named.value,
            named.assumed,
            Fit.EQUIVALENT,
            f"a name of Lightning 1; {TOOL} calls it {former}",
            fields,
        )
    return Spot(named.path, named.value, named.assumed, fields=fields)


def _spots(given: StrategyArguments, block: EngineBlock, *names: str) -> list[Spot]:
    """The arguments that say something, or the strategy's name."""
    written = [Spot(given.place(name), given.arguments[name]) for name in names if name in given.arguments]
    return written or [_named(given, block)]


def _with_name(given: StrategyArguments, block: EngineBlock, entries: list[Entry]) -> list[Entry]:
    """The entries, that of the strategy's name first, also where no argument comes from it."""
    if any(entry.path == given.named.path for entry in entries):
        return sorted(entries, key=lambda entry: entry.path != given.named.path)
    return [combined(_named(given, block), []), *entries]


def _deepspeed(given: StrategyArguments) -> Iterator[Entry]:
    if given.arguments.get("config") is not None:
        yield from _configured(given)
        return
    written = {**given.strategy.stands_for, **given.arguments}
    leaves = list(
        deepspeed_arguments.leaves_of(
            {name: value for name, value in written.items() if name in deepspeed_arguments.ARGUMENTS}
        )
    )
    block = EngineBlock("deepspeed", given.base, repeats=True)
    for leaf in leaves:
        if not leaf.assumed:
            block.add(leaf.key, leaf.value, *_spots(given, block, *leaf.arguments))
    scaling = _add_precision(given, block)
    defaults = {**{leaf.key: leaf.value for leaf in leaves if leaf.assumed}, **_unclipped(given)}
    parsed = block.parsed(defaults=defaults, topology=given.topology)
    yield from _with_name(given, block, block.placed(_without_precision(given, parsed)))
    yield from _precision_entry(given, parsed)
    used = {name for leaf in leaves for name in leaf.arguments} | scaling
    yield from _unused(given, used, "has no effect with the other arguments")


def _configured(given: StrategyArguments) -> Iterator[Entry]:
    """A DeepSpeed config inside, or in a file of its own."""
    place = given.place("config")
    try:
        config = _config(given.arguments["config"], given.folder)
    except (ConfigError, Unreadable) as error:
        note = f"cannot be read: {error}; put the file beside this one, or write its keys here"
        yield given.named._replace(effect=KeyEffect(fields={"backend": "deepspeed"}))
        yield given.of("config", KeyEffect(Fit.UNSUPPORTED, " ".join(note.split())))
        yield from _precision_entry(given, ())
        yield from _unused(given, {"config"}, _REPLACED)
        return
    given = given._replace(arguments={**given.arguments, "config": config})
    block = EngineBlock("deepspeed", place, native=dict(config))
    scaling = _add_precision(given, block)
    parsed = block.parsed(defaults=_unclipped(given), topology=given.topology)
    yield from _with_name(given, block, block.placed(map(_in_trainer, _without_precision(given, parsed))))
    yield from _precision_entry(given, parsed)
    yield from _unused(given, {"config", *scaling}, _REPLACED)


def _config(value: Any, folder: FilePath | None) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    if not isinstance(value, str):
        raise Unreadable("must be a DeepSpeed config or the path of one")
    return open_source((folder or FilePath()) / value).data


_ACCUMULATION = "Lightning 2.6.6 refuses this key in the DeepSpeed config; write accumulate_grad_batches"


def _in_trainer(entry: Entry) -> Entry:
    """A key that Lightning wants as an argument of the Trainer."""
    if entry.key != "gradient_accumulation_steps" or entry.assumed or entry.effect.fit is not Fit.EXACT:
        return entry
    return entry.but(Fit.EQUIVALENT, _ACCUMULATION)


def _unclipped(given: StrategyArguments) -> Mapping[str, Any]:
    """The Trainer writes gradient_clip_val or 0.0 where a config has no gradient_clipping; Fabric leaves DeepSpeed's
    default of 1.0.
    """
    return {} if given.strategy.fabric else {"gradient_clipping": 0.0}


def _add_precision(given: StrategyArguments, block: EngineBlock) -> set[str]:
    """Adds the sections that Lightning writes for the precision; the arguments that decide keys of them."""
    scaling = {name: given.arguments.get(name, value) for name, value in deepspeed_arguments.SCALING.items()}
    try:
        sections = precision_section(word_of(given.precision.value if given.precision else None), scaling)
    except Unreadable:
        return set()  # refused at its own place
    sections = {name: value for name, value in sections.items() if name not in block.native}
    for section, settings in sections.items():
        for name, value in settings.items():
            block.add(f"{section}.{name}", value, *(_spots(given, block, name) if name in scaling else ()))
    return set(scaling) if "fp16" in sections else set()


def _without_precision(given: StrategyArguments, parsed: Iterable[Entry]) -> list[Entry]:
    return [entry for entry in parsed if not _is_precision(given, entry)]


def _is_precision(given: StrategyArguments, entry: Entry) -> bool:
    """Whether an entry comes from the Trainer's precision: a block's switch, and what none of the arguments says beside
    it.
    """
    own = given.arguments.get("config")
    inside = isinstance(own, Mapping) and entry.path[0] in own
    if entry.path[0] not in ("fp16", "bf16") or inside or entry.assumed:
        return False
    return entry.path[-1] not in deepspeed_arguments.SCALING or entry.path[-1] not in given.arguments


def _precision_entry(given: StrategyArguments, parsed: Iterable[Entry]) -> Iterator[Entry]:
    if given.precision is None:
        return
    ours = [entry.effect for entry in parsed if _is_precision(given, entry)]
    try:
        word = word_of(given.precision.value)
    except Unreadable as error:
        yield given.precision._replace(effect=KeyEffect(Fit.UNSUPPORTED, str(error)))
        return
    if not ours and word != "32-true":
        note = "the block in the DeepSpeed config decides; Lightning only casts the inputs"
        yield given.precision._replace(effect=KeyEffect(Fit.IGNORED, note))
        return
    if not ours:
        config = given.arguments.get("config")
        plain = not (
            isinstance(config, Mapping) and any(key in config for key in ("fp16", "bf16", "bfloat16", "torch_autocast"))
        )
        yield given.precision._replace(effect=KeyEffect(fields={"precision.compute": "fp32"} if plain else {}))
        return
    if word.endswith("true"):
        ours.append(
            KeyEffect(
                Fit.EQUIVALENT, f"{word} also rounds the initial weights; DeepSpeed still keeps fp32 master weights"
            )
        )
    spot = Spot(given.precision.path, given.precision.value, given.precision.assumed)
    yield combined(spot, ours, repeats=True)


def _unused(given: StrategyArguments, used: set[str], why: str) -> Iterator[Entry]:
    known = {*deepspeed_arguments.ARGUMENTS, *deepspeed_arguments.SCALING, "config"}
    for name in given.arguments:
        if name in known and name not in used:
            note = "is off" if off(given.arguments[name]) else why
            yield given.of(name, left_out(note))
    rest = [name for name in given.arguments if name not in known]
    yield from _table(deepspeed_arguments.OWN, given, rest, known)


_READERS = {
    "DDPStrategy": _ddp,
    "FSDPStrategy": _fsdp,
    "DeepSpeedStrategy": _deepspeed,
    "ModelParallelStrategy": _model_parallel,
}
