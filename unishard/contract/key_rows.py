"""Makes the usual rows of a format's table of keys, and reads the values that people write in configs of other tools.

Those tools take text for numbers and YAML 1.1's words for booleans, so these readers do as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from unishard.config.describe import shown
from unishard.contract.entries import (
    NOTHING,
    DocumentValues,
    Key,
    KeyEffect,
    TemplateWord,
    Undecided,
    Unreadable,
    left_out,
)
from unishard.contract.render import AUTO
from unishard.contract.rules import Fit
from unishard.contract.templates import is_template_word

Convert = Callable[[Any], Any]
_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def boolean(value: Any) -> bool:
    """True or false, also as a word or as 0 and 1.

    Raises:
        Unreadable: It is something else.
    """
    if isinstance(value, bool):
        return value
    lowered = str(value).strip().lower()
    if lowered not in _BOOLEANS:
        raise _unreadable("true or false", value, "one of the two")
    return _BOOLEANS[lowered]


def is_true(value: Any) -> bool:
    """Whether a value is one that `boolean` reads as true."""
    return _BOOLEANS.get(str(value).strip().lower(), False)


def number(low: float = -math.inf, high: float = math.inf) -> Convert:
    """Reads a finite number in these bounds, also from text such as `1e-5`."""

    def convert(value: Any) -> float:
        parsed = _float(value)
        if parsed is None or not low <= parsed <= high:
            raise _unreadable(f"a number{_bounds(low, high)}", value)
        return parsed

    return convert


def integer(low: float = -math.inf, high: float = math.inf) -> Convert:
    """Reads a whole number in these bounds, also from text and from a float such as 5e8."""

    def convert(value: Any) -> int:
        parsed = _float(value)
        if parsed is None or parsed != int(parsed) or not low <= parsed <= high:
            raise _unreadable(f"a whole number{_bounds(low, high)}", value)
        try:
            return int(parsed if isinstance(value, float) else value)  # digits beyond a float's stay
        except ValueError:  # text such as 5e8
            return int(parsed)

    return convert


def _unreadable(expected: str, value: Any, write: str = "one") -> Unreadable:
    message = f"must be {expected}, got {shown(value)}; write {write}"
    return (TemplateWord if is_template_word(value) else Unreadable)(message, value)


def _float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        parsed = float(value)
    except (ValueError, OverflowError):
        return None
    return parsed if math.isfinite(parsed) else None


def _bounds(low: float, high: float) -> str:
    if math.isfinite(low) and math.isfinite(high):
        return f" from {low:g} to {high:g}"
    words = [
        f"{word} {limit:g}" for word, limit in (("of at least", low), ("of at most", high)) if math.isfinite(limit)
    ]
    return f" {words[0]}" if words else ""


def text(value: Any) -> str:
    """Text that is not empty.

    Raises:
        Unreadable: It is something else.
    """
    if not isinstance(value, str) or not value.strip():
        raise Unreadable(f"must be text, got {shown(value)}; write some", value)
    return value


def listed(value: Any) -> list[str]:
    """A list of names, also from text with commas between them.

    Raises:
        Unreadable: It is something else, or names nothing.
    """
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise Unreadable(f"must be a list of names, got {shown(value)}; write [A, B]", value)
    stripped = [name.strip() for name in names if name.strip()]
    if not stripped:
        raise Unreadable("must name something; remove the key or write a name")
    return stripped


def one_of(words: Mapping[str, Any]) -> Convert:
    """Reads one of these words, in any case, as the value that stands beside it."""

    def convert(value: Any) -> Any:
        choice = str(value).strip().lower()
        if choice not in words:
            raise Unreadable(f"must be one of {', '.join(words)}, got {shown(value)}; write one of them", value)
        return words[choice]

    return convert


def sets(
    field: str,
    convert: Convert,
    fit: Fit = Fit.EXACT,
    note: str = "",
    *,
    auto: str = "",
    tool_default: Any = NOTHING,
    copy_verbatim: bool = False,
) -> Key:
    """A key that decides one field.

    Args:
        field: Dotted path.
        convert: The field's value from the key's.
        fit: How well the field says it.
        note: How it differs.
        auto: Who decides the value of `"auto"`; empty where the key knows no such word.
        tool_default: What the tool assumes where a document does not have the key.
        copy_verbatim: Whether the key is repeated where the document is written in its own format again.
    """

    def read(value: Any, document: DocumentValues) -> KeyEffect:
        if auto and value == AUTO:
            return KeyEffect(Fit.NEEDS_INPUT, f"the value comes from {auto}", {field: Undecided(auto)})
        return KeyEffect(fit, note, {field: convert(value)}, copy_verbatim=copy_verbatim)

    return Key(read, (field,), fit, note, tool_default)


def broadcast_buffers(value: Any, document: DocumentValues) -> KeyEffect:
    """The argument of DistributedDataParallel that sends rank 0's buffers before each forward."""
    if not boolean(value):
        return KeyEffect(fields={"training.buffers": "local"})
    note = (
        "DDP sends them before each forward; here they are sent where they are read: at evaluation and in checkpoints"
    )
    return KeyEffect(Fit.EQUIVALENT, note, {"training.buffers": "rank0"})


def drops(why: str, *, tool_default: Any = NOTHING, unknown: bool = False) -> Key:
    """A key that concerns only a launcher, a log or files.

    It is copied when the document is written in its own format again.

    Args:
        why: What it concerns.
        tool_default: What the tool assumes where a document does not have the key.
        unknown: Whether the tool has no such key.
    """
    return Key(
        lambda value, document: KeyEffect(Fit.IGNORED, why, copy_verbatim=True, unknown=unknown),
        (),
        Fit.IGNORED,
        why,
        tool_default,
    )


def rejected(why: str) -> Key:
    """A key that its own tool refuses today, so that nothing is lost without it."""
    return Key(lambda value, document: KeyEffect(Fit.IGNORED, why, rejected_upstream=True), (), Fit.IGNORED, why)


def degree(field: str, note: str) -> Key:
    """A key for the size of groups of ranks, of which 1 is off.

    Args:
        field: That it sets.
        note: What is the same, and what is not.
    """

    def read(value: Any, document: DocumentValues) -> KeyEffect:
        size = 1 if value is None else integer(1)(value)
        return left_out("is off") if size == 1 else KeyEffect(Fit.EQUIVALENT, note, {field: size})

    return Key(read, (field,), Fit.EQUIVALENT, note)


def refuses(why: str, off: Callable[[Any], bool] | None = None) -> Key:
    """A key for something that unishard does not support.

    Args:
        why: The reason, and after a semicolon what instead.
        off: Whether a value switches it off, so that nothing is lost.
    """

    def read(value: Any, document: DocumentValues) -> KeyEffect:
        if off is not None and off(value):
            return left_out("is off")
        return KeyEffect(Fit.UNSUPPORTED, why)

    return Key(read, (), Fit.UNSUPPORTED, why)


def beyond_fields(row: Key) -> Key:
    """The row of a key that only the training script can follow, so that its values are compared as they stand."""
    return row._replace(read=lambda value, document: row.read(value, document)._replace(beyond_fields=True))


def own(key: str, convert: Convert, fit: Fit, note: str) -> Key:
    """A key for a setting that only one engine has.

    Args:
        key: The setting, dotted, after the engine's name: `deepspeed.zero_optimization.sub_group_size`.
        convert: Its value from the key's.
        fit: What is lost with another engine: `ignored` for what affects only time, memory or logs.
        note: Why.
    """
    return Key(lambda value, document: KeyEffect(fit, note, native={key: convert(value)}), (), fit, note)
