"""The arguments of Lightning's `DeepSpeedStrategy` (2.6.6), or the DeepSpeed config that it is given: they go through
DeepSpeed's backend, and come back to where they stand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from unishard.contract.entries import Entry, KeyEffect, Unreadable, left_out
from unishard.contract.rules import Fit
from unishard.errors import ConfigError
from unishard.formats.engine_block import EngineBlock, SourceKey, combined
from unishard.formats.lightning.deepspeed_json import ARGUMENTS, OWN, SCALING, leaves_of
from unishard.formats.lightning.precision import precision_section, word_of
from unishard.formats.lightning.rows import off
from unishard.formats.lightning.strategy_arguments import StrategyArguments
from unishard.formats.source import open_source

_REPLACED = "not used: config replaces every DeepSpeed argument"


def entries_of(settings: StrategyArguments) -> Iterator[Entry]:
    """What the strategy and its arguments say."""
    if settings.arguments.get("config") is not None:
        yield from _configured(settings)
        return
    written = {**settings.strategy.stands_for, **settings.arguments}
    leaves = list(leaves_of({name: value for name, value in written.items() if name in ARGUMENTS}))
    block = EngineBlock("deepspeed", settings.base)
    for leaf in leaves:
        if not leaf.assumed:
            block.add(leaf.key, leaf.value, *settings.source_keys(block, *leaf.arguments))
    scaling = _add_precision(settings, block)
    defaults = {**{leaf.key: leaf.value for leaf in leaves if leaf.assumed}, **_unclipped(settings)}
    parsed = block.parsed(defaults=defaults, topology=settings.topology)
    yield from settings.with_name(block, block.placed(_without_precision(settings, parsed)))
    yield from _precision_entry(settings, parsed)
    used = {name for leaf in leaves for name in leaf.arguments} | scaling
    yield from _unused(settings, used, "has no effect with the other arguments")


def _configured(settings: StrategyArguments) -> Iterator[Entry]:
    """A DeepSpeed config inside, or in a file of its own."""
    place = settings.place("config")
    try:
        config = _config(settings.arguments["config"], settings.folder)
    except (ConfigError, Unreadable) as error:
        note = f"cannot be read: {error}; put the file beside this one, or write its keys here"
        yield settings.named._replace(effect=KeyEffect(fields={"backend": "deepspeed"}))
        yield settings.of("config", KeyEffect(Fit.UNSUPPORTED, " ".join(note.split())))
        yield from _precision_entry(settings, ())
        yield from _unused(settings, {"config"}, _REPLACED)
        return
    settings = settings._replace(arguments={**settings.arguments, "config": config})
    block = EngineBlock("deepspeed", place, native=dict(config))
    scaling = _add_precision(settings, block)
    parsed = block.parsed(defaults=_unclipped(settings), topology=settings.topology)
    yield from settings.with_name(block, block.placed(map(_in_trainer, _without_precision(settings, parsed))))
    yield from _precision_entry(settings, parsed)
    yield from _unused(settings, {"config", *scaling}, _REPLACED)


def _config(value: Any, folder: Path | None) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    if not isinstance(value, str):
        raise Unreadable("must be a DeepSpeed config or the path of one")
    return open_source((folder or Path()) / value).data


_ACCUMULATION = "Lightning 2.6.6 refuses this key in the DeepSpeed config; write accumulate_grad_batches"


def _in_trainer(entry: Entry) -> Entry:
    """A key that Lightning wants as an argument of the Trainer."""
    if entry.key != "gradient_accumulation_steps" or entry.assumed or entry.effect.fit is not Fit.EXACT:
        return entry
    return entry.but(Fit.EQUIVALENT, _ACCUMULATION)


def _unclipped(settings: StrategyArguments) -> Mapping[str, Any]:
    """The Trainer writes gradient_clip_val or 0.0 where a config has no gradient_clipping; Fabric leaves DeepSpeed's
    default of 1.0.
    """
    return {} if settings.strategy.fabric else {"gradient_clipping": 0.0}


def _add_precision(settings: StrategyArguments, block: EngineBlock) -> set[str]:
    """Adds the sections that Lightning writes for the precision; the arguments that decide keys of them."""
    scaling = {name: settings.arguments.get(name, value) for name, value in SCALING.items()}
    try:
        sections = precision_section(word_of(settings.precision.value if settings.precision else None), scaling)
    except Unreadable:
        return set()  # refused at its own place
    sections = {name: value for name, value in sections.items() if name not in block.native}
    for section, keys in sections.items():
        for name, value in keys.items():
            block.add(f"{section}.{name}", value, *(settings.source_keys(block, name) if name in scaling else ()))
    return set(scaling) if "fp16" in sections else set()


def _without_precision(settings: StrategyArguments, parsed: Iterable[Entry]) -> list[Entry]:
    return [entry for entry in parsed if not _is_precision(settings, entry)]


def _is_precision(settings: StrategyArguments, entry: Entry) -> bool:
    """Whether an entry comes from the Trainer's precision: a block's switch, and what none of the arguments says beside
    it.
    """
    own = settings.arguments.get("config")
    inside = isinstance(own, Mapping) and entry.path[0] in own
    if entry.path[0] not in ("fp16", "bf16") or inside or entry.assumed:
        return False
    return entry.path[-1] not in SCALING or entry.path[-1] not in settings.arguments


def _precision_entry(settings: StrategyArguments, parsed: Iterable[Entry]) -> Iterator[Entry]:
    if settings.precision is None:
        return
    ours = [entry.effect for entry in parsed if _is_precision(settings, entry)]
    try:
        precision = word_of(settings.precision.value)
    except Unreadable as error:
        yield settings.precision._replace(effect=KeyEffect(Fit.UNSUPPORTED, str(error)))
        return
    if not ours and precision != "32-true":
        note = "the block in the DeepSpeed config decides; Lightning only casts the inputs"
        yield settings.precision._replace(effect=KeyEffect(Fit.IGNORED, note))
        return
    if not ours:
        config = settings.arguments.get("config")
        plain = not (
            isinstance(config, Mapping) and any(key in config for key in ("fp16", "bf16", "bfloat16", "torch_autocast"))
        )
        yield settings.precision._replace(effect=KeyEffect(fields={"precision.compute": "fp32"} if plain else {}))
        return
    if precision.endswith("true"):
        ours.append(
            KeyEffect(
                Fit.EQUIVALENT,
                f"{precision} also rounds the initial weights; DeepSpeed still keeps fp32 master weights",
            )
        )
    source_key = SourceKey(settings.precision.path, settings.precision.value, settings.precision.assumed)
    yield combined(source_key, ours)


def _unused(settings: StrategyArguments, used: set[str], why: str) -> Iterator[Entry]:
    known = {*ARGUMENTS, *SCALING, "config"}
    for name in settings.arguments:
        if name in known and name not in used:
            note = "is off" if off(settings.arguments[name]) else why
            yield settings.of(name, left_out(note))
    rest = [name for name in settings.arguments if name not in known]
    yield from settings.table(OWN, rest, known)
