"""Which files leave the engine to a launcher outside of them, or say nothing: they are refused until something says
it.
"""

from __future__ import annotations

from collections.abc import Iterable

from unishard.config.nested import is_within
from unishard.contract.entries import Entry
from unishard.contract.rules import Fit
from unishard.errors import ConfigError, Problem, in_parts
from unishard.formats.reading.document import ReadDocument
from unishard.formats.reading.dropping import DroppedKey
from unishard.formats.report.items import Item

RECIPES = ("hf", "trl", "llamafactory")
"""Formats of TrainingArguments, whose engine may be chosen by a launcher outside the file."""
_STRATEGY = "sharding.strategy"
_ENGINES = {"deepspeed", "fsdp", "fsdp_config"}
PLAIN = f"{_STRATEGY}=no_shard"
"""The override that decides it as DistributedDataParallel."""
_NO_ENGINE = (
    "does not say its engine, which its launcher chooses; add --with zero3.yaml (a config of Accelerate or DeepSpeed), "
    "or --with 'accelerate launch --config_file ...' (the command that trains), or --set backend=... --set "
    "sharding.strategy=... (no_shard is plain DistributedDataParallel)"
)

_NOTHING = (
    "so that the engine and all else are unknown; name its format with --from, or write what trains at the top of a "
    "file of its own"
)


def engine_is_open(entries: Iterable[Entry]) -> bool:
    """Whether TrainingArguments leave the engine to the launcher, without which they mean plain data parallelism."""
    return any(map(leaves_engine, entries))


def leaves_engine(entry: Entry) -> bool:
    """Whether it is what TrainingArguments mean that name no engine."""
    return entry.assumed and entry.path[-1] == "fsdp" and entry.value is False and not entry.place


def check_engine(reading: ReadDocument, to: str, overrides: Iterable[str], dropped: Iterable[DroppedKey]) -> None:
    """Refuse a recipe without an engine, where what is written must name one.

    Args:
        reading: A document of any format.
        to: The format to write. One of TrainingArguments leaves the engine to the launcher as well.
        overrides: Changes on top, which may decide the strategy.
        dropped: Keys that were left out on request. Whoever leaves out the engine has decided it.

    Raises:
        ConfigError: Nothing decides the engine.
    """
    decided = [text.partition("=")[0].strip() for text in overrides]
    if to in (*RECIPES, reading.format) or is_within(_STRATEGY, decided):
        return
    if needs_engine(reading) and not any(_ENGINES & set(one.key.split(".")) for one in dropped):
        raise ConfigError([Problem("", _NO_ENGINE, reading.source.name)])


def check_understood(reading: ReadDocument, items: Iterable[Item], tool: str) -> None:
    """Refuse a document that says nothing of the training: what is written would be defaults, in silence.

    Args:
        reading: A document of any format.
        items: What became of each key.
        tool: Who reads such documents.

    Raises:
        ConfigError: Nothing is carried over, and there are keys that the tool does not know.
    """
    written = [item for item in items if not item.assumed]
    unknown = [item.entry for item in written if item.entry.effect.unknown]
    if not unknown or any(item.fit is not Fit.IGNORED for item in written):
        return
    hinted = [
        Problem(entry.key, entry.effect.note, str(reading.source.origins.of(entry.path)))
        for entry in unknown
        if in_parts(entry.effect.note)[1]
    ]
    raise ConfigError([Problem("", f"has no key that {tool} trains by, {_NOTHING}", reading.source.name), *hinted])


def needs_engine(reading: ReadDocument) -> bool:
    """Whether a launcher outside of a file chooses the engine, and nothing in the file says it.

    A mapping comes from a program that runs already: nothing launches it, so that it means DistributedDataParallel.
    """
    return reading.source.folder is not None and engine_is_open(reading.entries)
