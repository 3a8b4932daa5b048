"""From a document in one format to a document in another, with one line for each key of the first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from unishard.config.nested import Native, merge
from unishard.config.topology import Topology
from unishard.contract.render import RenderedDocument
from unishard.contract.rules import Fit
from unishard.errors import BackendError, ConfigError, Problem
from unishard.formats import catalog
from unishard.formats.beside.engine_choice import check_engine, check_understood
from unishard.formats.engines.same import stays_with_engine
from unishard.formats.files.source import Source, open_source
from unishard.formats.format import Format
from unishard.formats.reading.document import ReadDocument, assemble
from unishard.formats.reading.dropping import DroppedKey, check_used, drop_entries, drop_keys
from unishard.formats.report.comparing import FieldRow
from unishard.formats.report.items import Item, item_of, refused_overrides
from unishard.formats.report.readback import Join, read_back
from unishard.formats.writing.kept_keys import kept_keys
from unishard.formats.writing.own_words import in_own_words
from unishard.formats.writing.saved_files import carried, described, with_files

if TYPE_CHECKING:
    from unishard.formats.beside.supplied import Supplied


class Outcome(NamedTuple):
    """A translated document, and what became of each key."""

    reading: ReadDocument
    to: str
    """The format."""
    items: tuple[Item, ...]
    document: Native
    text: str
    """The document as a file holds it."""
    warnings: tuple[str, ...]
    launch: str = ""
    """The torchrun line for the processes that the source asks for, where the other format does not say it; empty where
    there is none."""
    overrides: tuple[str, ...] = ()
    """The changes on top that were asked for."""
    drop: tuple[str, ...] = ()
    """The keys that were to be left out."""
    dropped: tuple[DroppedKey, ...] = ()
    """What was left out of it."""
    supplied: Supplied | None = None
    """What was read beside the document."""
    changes: tuple[FieldRow, ...] = ()
    """What the translation means otherwise, though no item says so."""

    def of(self, fit: Fit) -> list[Item]:
        """The items with this fit."""
        return [item for item in self.items if item.fit is fit]

    def status(self, *, strict: bool) -> int:
        """Exit status: 1 if something is refused, 2 if something is approximate under `strict`, else 0."""
        if self.of(Fit.UNSUPPORTED):
            return 1
        changed = self.of(Fit.APPROXIMATE) or any(change.before.said for change in self.changes)
        return 2 if strict and changed else 0


def read(
    source: str | Path | Mapping[str, Any] | Source,
    from_: str | None = None,
    overrides: Iterable[str] = (),
    topology: Topology | None = None,
) -> ReadDocument:
    """What a config of any tool says.

    Args:
        source: Path of a YAML, JSON or TOML file, or what one would hold, or a file that is open already.
        from_: Name of its format; left out, it is recognised from its keys.
        overrides: Changes on top, such as `training.micro_batch_size=4`.
        topology: The ranks; left out, those that the document speaks of.

    Raises:
        ConfigError: The file cannot be read, is in no known format, or an override cannot be used.
    """
    opened = open_source(source)
    format_, document = catalog.chosen(opened, from_)
    return format_.read(document, tuple(overrides), topology)


def translate(
    source: str | Path | Mapping[str, Any] | Source,
    to: str,
    *,
    from_: str | None = None,
    overrides: Iterable[str] = (),
    topology: Topology | None = None,
    drop: Iterable[str] = (),
    with_: str | Path | None = None,
) -> Outcome:
    """Translate a config of any tool into the format of another. Imports neither torch nor an engine.

    Args:
        source: Path of a YAML, JSON or TOML file, or what one would hold, or a file that is open already.
        to: Name of the format to write.
        from_: Name of the source's format; left out, it is recognised from its keys.
        overrides: Changes on top, such as `backend=fsdp`; they also decide what only the training script knows.
        topology: The ranks; left out, those that the document speaks of, or one.
        drop: Keys to leave out, as dotted names or globs; the document then means what it means without them.
        with_: What fills the values that the document leaves open: a file of TrainingArguments, Accelerate or
            DeepSpeed, or the command that trains.

    Returns:
        The document and one item for each key of the source. What is not supported stands among the items as refused.

    Raises:
        ConfigError: The format is only read, the file cannot be read or is in no known format, an override cannot be
            used, a key to drop is not there, or nothing says which engine a file of TrainingArguments trains with.
    """
    target, overrides, drop = catalog.target(to), tuple(overrides), tuple(drop)
    source = open_source(source)
    reading, dropped = _read_without(source, from_, overrides, topology, drop)
    supplied = None
    if with_ is not None:
        from unishard.formats.beside.filling import filled  # few translations need it

        left = [pattern for pattern in drop if pattern not in {one.pattern for one in dropped}]
        reading, supplied, further = filled(reading, with_, overrides=overrides, topology=topology, to=to, drop=left)
        dropped += further
    check_used(drop, dropped, source)
    check_engine(reading, to, overrides, dropped)
    own, written = _written(target, reading, topology or reading.topology or Topology())
    items, document = _described(target, reading, written, overrides, own=own)
    check_understood(reading, items, catalog.get(reading.format).tool)
    warnings = [*reading.source.warnings]
    changed: tuple[FieldRow, ...] = ()
    back = _read_back(target, document, reading, items, warnings)
    if back:
        joined = Join(reading, written.fields, back)
        items = tuple(joined.lines(items))
        changed = joined.changes(items)
        warnings += [*joined.refusals(target.tool), *filter(None, [getattr(target, "wants", _nothing)(document)])]
    if not document and not any(item.fit is Fit.UNSUPPORTED for item in items):
        warnings.append(f"nothing to write: {target.tool} has no key for what the file says")
    return Outcome(
        reading,
        to,
        items,
        document,
        target.render(document, reading),
        tuple(warnings),
        _launch(reading, to) or (supplied.launch.torchrun() if supplied else ""),
        overrides,
        drop,
        tuple(dropped),
        supplied,
        changed,
    )


def _read_back(
    target: Format, document: Native, reading: ReadDocument, items: tuple[Item, ...], warnings: list[str]
) -> ReadDocument | None:
    """What a document means that may be written; None, and a warning, where its own tool would not read it as it
    stands.
    """
    if any(item.fit is Fit.UNSUPPORTED for item in items):
        return None
    try:
        return read_back(target, document, reading)
    except ConfigError as error:
        warnings.append(f"not compared with its source: {error}")
        return None


def _described(
    target: Format, reading: ReadDocument, written: RenderedDocument, overrides: tuple[str, ...], *, own: bool
) -> tuple[tuple[Item, ...], Native]:
    """One item for each key, and the document."""
    further = tuple(refused_overrides(overrides, reading, written))
    items = (item_of(entry, reading, target, written) for entry in reading.entries)
    if own:
        return (*items, *further), written.document
    carried_keys = carried(reading, target.name)
    kept = kept_keys(reading, written, carried_keys) if reading.format == target.name else {}
    document = with_files(merge(written.document, kept), carried_keys.values())
    return (*(described(item, carried_keys, target.name) for item in items), *further), document


def _nothing(document: Native) -> str:
    return ""


def _launch(reading: ReadDocument, to: str) -> str:
    launch = getattr(catalog.get(reading.format), "launch", None)
    return launch(reading).torchrun() if launch and reading.format != to else ""


def _read_without(
    source: Source, from_: str | None, overrides: tuple[str, ...], topology: Topology | None, drop: tuple[str, ...]
) -> tuple[ReadDocument, list[DroppedKey]]:
    """What a document says without the keys to drop. They count for its format, and for nothing else."""
    format_, source = catalog.chosen(source, from_)
    source, dropped = drop_keys(source, drop)
    reading = format_.read(source, overrides, topology)
    if not drop:
        return reading, dropped
    entries, further = drop_entries(reading.entries, drop)
    if further:
        reading = assemble(
            reading.format,
            source,
            entries,
            overrides=overrides,
            topology=reading.topology,
            fills_auto=reading.fills_auto,
        )
    return reading, [*dropped, *further]


def _written(target: Format, reading: ReadDocument, ranks: Topology) -> tuple[bool, RenderedDocument]:
    """Whether it is the document in its own words, and what is written."""
    stays = reading.format == target.name and stays_with_engine(reading)
    try:
        own = in_own_words(target, reading, ranks) if stays else None
        return own is not None, own or target.write(reading, ranks)
    except BackendError as error:
        raise ConfigError([Problem("backend", str(error), reading.source.name)]) from None
