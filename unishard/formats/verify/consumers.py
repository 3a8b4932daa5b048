"""Which tool reads which format, and what it makes of a document."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from unishard.config import value_at
from unishard.config.loading import load
from unishard.formats import Outcome, ReadDocument, catalog
from unishard.formats.verify.settings import AUTO, Effective, Settings, of_config

Document = Mapping[str, Any]


class _Consumer(NamedTuple):
    """A tool that can be asked."""

    tool: str
    package: str
    settings: Callable[[Any, Document, str, ReadDocument, int], Settings]
    """From the module of this room, the document, its text, the reading and the ranks."""
    module: str = ""
    """Of this room; left out, the name of the format."""


def _around_transformers(name: str) -> _Consumer:
    """A tool that hands its file to transformers, which is asked in its place."""
    return _Consumer(
        "transformers",
        "transformers",
        lambda at, document, text, reading, ranks: at.settings_around(document, reading.source.folder, name),
        module="hf",
    )


_CONSUMERS: Mapping[str, _Consumer] = {
    "deepspeed": _Consumer(
        "DeepSpeed", "deepspeed", lambda at, document, text, reading, ranks: at.settings_of(document, ranks)
    ),
    "accelerate": _Consumer(
        "Accelerate",
        "accelerate",
        lambda at, document, text, reading, ranks: at.settings_of(text, reading.source.folder, ranks),
    ),
    "hf": _Consumer(
        "transformers",
        "transformers",
        lambda at, document, text, reading, ranks: at.settings_of(document, reading.source.folder),
    ),
    **{name: _around_transformers(name) for name in ("llamafactory", "trl")},
}


def of_source(outcome: Outcome) -> Effective:
    """What the tool of the source makes of it; what unishard reads in it where that tool cannot be asked."""
    reading = outcome.reading
    consumer = _CONSUMERS.get(reading.format)
    effective = Effective({}, "", missing="no other reader of it is known")
    if consumer:
        effective = _asked(
            reading.format, consumer, reading.source.data, json.dumps(reading.source.data, default=str), outcome
        )
    if not effective.settings:
        settings = {
            field: AUTO if field in reading.undecided else value for field, value in of_config(reading.config).items()
        }
        own = {
            field: value for field, value in settings.items() if field in reading.decided or field == "sharding.units"
        }
        return effective._replace(settings=own, consumer="unishard")
    return effective


def read_settings(outcome: Outcome) -> Effective:
    """What the tool for which a translation is written makes of it."""
    if outcome.to == "unishard":
        return _own(outcome)
    consumer = _CONSUMERS.get(outcome.to)
    if consumer is None:
        return Effective(
            {},
            outcome.to,
            missing=f"{catalog.get(outcome.to).tool} cannot be verified here: unishard cannot ask it what it makes of "
            "a file",
        )
    return _asked(outcome.to, consumer, outcome.document, outcome.text, outcome)


def _own(outcome: Outcome) -> Effective:
    """What `unishard.load` reads, with stand-ins for the values that need a decision."""
    reading, who = outcome.reading, f"unishard {version('unishard')}"
    open_ = [(path, value_at(reading.config, path)) for path in reading.undecided]
    try:
        config = load(_parsed(outcome.text), [f"{path}={json.dumps(value, default=list)}" for path, value in open_])
    except Exception as error:
        return Effective({}, who, refused=_first_line(error))
    return Effective({**of_config(config), **{path: AUTO for path, _ in open_}}, who)


def _parsed(text: str) -> Document:
    from unishard.config.loading.yaml_file import from_text

    data: Document = from_text(text, "written").data
    return data


def _asked(name: str, consumer: _Consumer, document: Document, text: str, outcome: Outcome) -> Effective:
    topology = outcome.reading.topology
    ranks = topology.world_size if topology else 1
    with _without_logs():
        return _answer(name, consumer, lambda module: consumer.settings(module, document, text, outcome.reading, ranks))


@contextmanager
def _without_logs() -> Iterator[None]:
    """The tools log what they find on this machine, which says nothing about a config."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _answer(name: str, consumer: _Consumer, ask: Callable[[Any], Settings]) -> Effective:
    try:
        installed = version(consumer.package)
        module = import_module(f"unishard.formats.verify.{consumer.module or name}")
        import_module(consumer.package)
    except (ImportError, PackageNotFoundError):
        return Effective({}, consumer.tool, missing=f"{consumer.tool} is not installed; pip install {consumer.package}")
    who = f"{consumer.tool} {installed}"
    try:
        return Effective(ask(module), who)
    except (Exception, SystemExit) as error:
        return Effective({}, who, refused=_first_line(error))


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
