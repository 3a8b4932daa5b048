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
from unishard.formats.engine_block import EngineBlock, Spot, combined
from unishard.formats.lightning.deepspeed_json import ARGUMENTS, OWN, SCALING, leaves_of
from unishard.formats.lightning.precision import precision_section, word_of
from unishard.formats.lightning.rows import off
from unishard.formats.lightning.strategy_arguments import StrategyArguments
from unishard.formats.source import open_source

_REPLACED = "not used: config replaces every DeepSpeed argument"


def entries_of(given: StrategyArguments) -> Iterator[Entry]:
    """What the strategy and its arguments say."""
    if given.arguments.get("config") is not None:
        yield from _configured(given)
        return
    written = {**given.strategy.stands_for, **given.arguments}
    leaves = list(leaves_of({name: value for name, value in written.items() if name in ARGUMENTS}))
    block = EngineBlock("deepspeed", given.base)
    for leaf in leaves:
        if not leaf.assumed:
            block.add(leaf.key, leaf.value, *given.spots(block, *leaf.arguments))
    scaling = _add_precision(given, block)
    defaults = {**{leaf.key: leaf.value for leaf in leaves if leaf.assumed}, **_unclipped(given)}
    parsed = block.parsed(defaults=defaults, topology=given.topology)
    yield from given.with_name(block, block.placed(_without_precision(given, parsed)))
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
    yield from given.with_name(block, block.placed(map(_in_trainer, _without_precision(given, parsed))))
    yield from _precision_entry(given, parsed)
    yield from _unused(given, {"config", *scaling}, _REPLACED)


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


def _unclipped(given: StrategyArguments) -> Mapping[str, Any]:
    """The Trainer writes gradient_clip_val or 0.0 where a config has no gradient_clipping; Fabric leaves DeepSpeed's
    default of 1.0.
    """
    return {} if given.strategy.fabric else {"gradient_clipping": 0.0}


def _add_precision(given: StrategyArguments, block: EngineBlock) -> set[str]:
    """Adds the sections that Lightning writes for the precision; the arguments that decide keys of them."""
    scaling = {name: given.arguments.get(name, value) for name, value in SCALING.items()}
    try:
        sections = precision_section(word_of(given.precision.value if given.precision else None), scaling)
    except Unreadable:
        return set()  # refused at its own place
    sections = {name: value for name, value in sections.items() if name not in block.native}
    for section, settings in sections.items():
        for name, value in settings.items():
            block.add(f"{section}.{name}", value, *(given.spots(block, name) if name in scaling else ()))
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
    return entry.path[-1] not in SCALING or entry.path[-1] not in given.arguments


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
    yield combined(spot, ours)


def _unused(given: StrategyArguments, used: set[str], why: str) -> Iterator[Entry]:
    known = {*ARGUMENTS, *SCALING, "config"}
    for name in given.arguments:
        if name in known and name not in used:
            note = "is off" if off(given.arguments[name]) else why
            yield given.of(name, left_out(note))
    rest = [name for name in given.arguments if name not in known]
    yield from given.table(OWN, rest, known)
