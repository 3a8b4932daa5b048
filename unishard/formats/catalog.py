"""Which formats there are, and which of them a document is in."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

from unishard.contract import registry
from unishard.contract.entries import Path
from unishard.errors import BackendError, ConfigError, Problem
from unishard.formats.files.source import Source, open_named
from unishard.formats.format import Format
from unishard.formats.markers import Coverage, by_markers, has
from unishard.formats.other_tools import OtherTool, named

_HYDRA = ("hydra", "_target_")
"""Keys of what Hydra runs or builds."""
OF_HYDRA = (
    "translate what `python train.py --cfg job` prints or the DeepSpeed JSON that it names, or run `unishard init`"
)
"""What to do with a config that Hydra composes or builds."""
_INSIDE = ("deepspeed", "deepspeed_config", "ds_config")
"""Keys of other tools' files below which a config of DeepSpeed stands."""
_ZERO = "zero_optimization"
_ENOUGH_INSIDE = 3
"""Weight of the keys from which on a mapping is a config of DeepSpeed, and not that of another tool around it."""

_LOUD = 3
_ENOUGH = 2
"""A key that several tools have says too little."""

BLOCKS = "deepspeed"
"""The format whose documents stand in the files of other tools too."""

NAMES = tuple(registry.available(registry.FORMATS))
"""The formats, by the word after `--from` and `--to`."""
_REMOVED = {"axolotl": "axolotl", "composer": "Composer", "swift": "ms-swift", "torchtitan": "torchtitan"}
"""Formats that once were, and their tools."""


def get(name: str) -> Format:
    """The format of this name.

    Raises:
        ConfigError: There is no such format.
    """
    if name in _REMOVED and name not in NAMES:
        message = (
            f"configs of {_REMOVED[name]} are not translated any more; for what still is of one, leave --from out; "
            "for TrainingArguments, write --to hf"
        )
        raise ConfigError([Problem("", message)])
    try:
        return cast(Format, registry.load(registry.FORMATS, name))
    except BackendError as error:
        raise ConfigError([Problem("", str(error))]) from None


def writable() -> tuple[str, ...]:
    """The formats by the word after `--to`: all but those that are only read."""
    return tuple(name for name in NAMES if not getattr(get(name), "read_only", False))


def target(name: str) -> Format:
    """The format of this name, to write it.

    Raises:
        ConfigError: There is no such format, or it is only read.
    """
    format_ = get(name)
    if getattr(format_, "read_only", False):
        message = (
            f"configs of {format_.tool} are read and never written; {format_.instead}, or write --to "
            f"{', '.join(writable())}"
        )
        raise ConfigError([Problem(f"--to {name}", message)])
    return format_


def chosen(source: Source, from_: str | None) -> tuple[Format, Source]:
    """The format that was named, or that the document is in, and what is read of the document: all, or an engine's
    config in it.

    Raises:
        ConfigError: See `recognise`.
    """
    if from_ is None:
        return recognise(source), source
    inner = block(source) if from_ == BLOCKS else None
    return get(from_), inner.source if inner else _as_asked(source)


def _as_asked(source: Source) -> Source:
    """A document that is read as a format that was named, with a warning where its keys name another tool."""
    other_tool = named(source.data)
    if other_tool is None:
        return source
    tool, keys = other_tool
    doubt = f"has keys of {tool.name} ({', '.join(keys)}), which may assume other values where the file is silent"
    return source._replace(warnings=(*source.warnings, doubt))


class InnerConfig(NamedTuple):
    """A config of an engine inside a file."""

    key: str
    """Dotted; with the name of the file that stands there, if one does, as in `trainer.deepspeed: ds.json`."""
    source: Source
    """The config, with a warning that says what is not read."""


def block(source: Source) -> InnerConfig | None:
    """DeepSpeed's own config in the file of a tool that only hands it on, whose other keys unishard does not read, or
    in the file that it names; None where there is none, or the document is rather one itself.
    """
    candidates = [InnerConfig(*one) for one in _blocks(source, (), source.data)]
    if not candidates or (_weight(candidates[0].source.data) <= _weight(source.data) and not named(source.data)):
        return None
    first, *others = candidates
    differ = [one.key for one in others if one.source.data != first.source.data]
    only = f"only {first.key} is read; what the other keys say is not translated"
    also = [
        f"has other configs of this engine too ({', '.join(differ)}); put them into files of their own to translate "
        "them"
    ]
    return InnerConfig(
        first.key, first.source._replace(warnings=(*first.source.warnings, only, *(also if differ else [])))
    )


def _weight(data: Mapping[str, Any]) -> int:
    """How much a mapping speaks for a config of DeepSpeed."""
    return get(BLOCKS).markers.weight(data)


def _blocks(source: Source, path: Path, data: Mapping[str, Any]) -> Iterator[tuple[str, Source]]:
    """Each mapping that is a config of DeepSpeed: it stands below a key for one, or has the section that none lacks."""
    for key, value in data.items():
        here = (*path, key)
        if isinstance(value, str) and key in _INSIDE:
            inner = _named(source, value)
            if inner and _weight(inner.data) >= _ENOUGH_INSIDE:
                yield f"{'.'.join(here)}: {value}", inner
        elif isinstance(value, Mapping):
            if (set(_INSIDE) & set(here) or _ZERO in value) and _weight(value) >= _ENOUGH_INSIDE:
                yield ".".join(here), source._replace(data=value, origins=source.origins.below(here), repeats=())
            else:
                yield from _blocks(source, here, value)


def _named(source: Source, name: str) -> Source | None:
    try:
        return open_named(name, source.folder)
    except ConfigError:  # its own line of `unishard translate DIR` says why
        return None


def recognise(source: Source) -> Format:
    """The format that a document is in: one whose markers it has, and which knows most of its keys.

    Raises:
        ConfigError: It is in none of them, or as likely in one as in another.
    """
    if message := _foreign(source):
        raise ConfigError([Problem("", message, source.name)])
    weights = _weights(source.data)
    likely = sorted((name for name in NAMES if weights[name] >= _ENOUGH), key=lambda name: -weights[name])
    coverage = {name: _coverage(name, source) for name in likely}
    known = [name for name in likely if coverage[name].most]
    rivals = [name for name in known if weights[name] == weights[known[0]]]
    if len(rivals) > 1:
        best = max(coverage[name].share for name in rivals)
        rivals = [name for name in rivals if coverage[name].share == best]
    inner = block(source)
    if len(rivals) == 1 and not (inner and _overlooks(rivals[0], source, inner)):
        return get(rivals[0])
    keys = ", ".join(list(source.data)[:5]) or "none"
    if len(rivals) > 1:
        message = (
            f"matches several formats: {', '.join(rivals)} (its keys: {keys}); name one with `unishard translate "
            "--from`"
        )
    elif likely:
        unknown = coverage[likely[0]].unknown
        named_ = f" ({', '.join(unknown[:5])}{', ...' if len(unknown) > 5 else ''})" if unknown else ""
        message = f"resembles a config of {get(likely[0]).tool}, which does not know most of its keys{named_}" + (
            _or_inside(inner) if inner else f"; if it is one: `unishard translate --from {likely[0]}`"
        )
    else:
        hint = _or_as(source) or f"; name one with `unishard translate --from`: {', '.join(NAMES)}"
        message = f"matches no known format (its keys: {keys}){hint}"
    raise ConfigError([Problem("", message, source.name)])


def _foreign(source: Source) -> str:
    """Why a document is none that unishard reads, if its keys name another tool; empty otherwise."""
    if other_tool := named(source.data):
        tool, keys = other_tool
        return (
            f"is a config of {tool.name} ({', '.join(keys)}), which unishard does not read; {instead(tool, source)}; "
            "if it is not one, name its format with `unishard translate --from`"
        )
    if source.data.get("format") == "unishard" and has(source.data, "model.fingerprint"):
        return (
            "is the manifest of a checkpoint; see it with `unishard checkpoint inspect`, and name the config of the run"
        )
    if _of_hydra(source.data):
        return f"is a config of Hydra, which unishard does not read; {OF_HYDRA}{_or_as(source)}"
    return ""


def _of_hydra(data: Mapping[str, Any]) -> bool:
    return isinstance(data.get("defaults"), list) or any(has(data, key) for key in _HYDRA)


def instead(tool: OtherTool, source: Source) -> str:
    """What to do with a document of a tool that unishard does not read."""
    inner = block(source)
    if inner is None:
        return tool.instead(source.data)
    return (
        f"translate the config of DeepSpeed in it ({inner.key}) with `unishard translate --from {BLOCKS}`, or run "
        "`unishard init`"
    )


def _or_as(source: Source) -> str:
    """The format in which a document, or what it holds of DeepSpeed, is read if one asks for it; empty for none."""
    if inner := block(source):
        return _or_inside(inner)
    best, weight = _loudest(source.data)
    return f", or read it with `unishard translate --from {best}`" if weight >= _ENOUGH else ""


def _or_inside(inner: InnerConfig) -> str:
    return f"; the config of DeepSpeed in it ({inner.key}) is read with `unishard translate --from {BLOCKS}`"


def _overlooks(name: str, source: Source, inner: InnerConfig) -> bool:
    """Whether a tool does not know what it would hand on to DeepSpeed."""
    entries = get(name).read(source).entries
    return any(entry.effect.unknown and f"{entry.key}.".startswith(f"{inner.key}.{_ZERO}.") for entry in entries)


def _coverage(name: str, source: Source) -> Coverage:
    format_ = get(name)
    by_marker = by_markers(format_.markers.keys, source.data)
    return by_marker if by_marker.most else format_.coverage(source)


def loudest(source: Source) -> tuple[str, int]:
    """The format that the keys of a document speak for most, and the sum of their weights; 0 for not at all."""
    best, weight = _loudest(source.data)
    return best, 0 if _foreign(source) else weight


def _loudest(data: Mapping[str, Any]) -> tuple[str, int]:
    weights = _weights(data)
    return max(weights.items(), key=lambda one: one[1])


def loudly_of_hydra(source: Source) -> bool:
    """Whether Hydra composes or builds a document, the keys of which speak for a format."""
    return _of_hydra(source.data) and max(_weights(source.data).values()) >= _LOUD


def mentions(text: str) -> bool:
    """Whether a text that cannot be read has a key that speaks for a format."""
    loud = (
        key for name in NAMES for key, weight in get(name).markers.keys.items() if weight >= _LOUD and "." not in key
    )
    return re.search(rf"\b({'|'.join(dict.fromkeys(loud))})[\"']?\s*[:=]", text) is not None


def _weights(data: Mapping[str, Any]) -> dict[str, int]:
    return {name: get(name).markers.weight(data) for name in NAMES}
