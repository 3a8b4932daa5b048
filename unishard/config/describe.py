"""Describe the schema's types and values in error messages and in the reference."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from unishard.config.section import Section

_SIMPLE = {str: "text", bool: "true or false", type(None): "null", dict: "a mapping", Any: "any value"}
_NUMBERS = {int: ("a whole number", "whole numbers"), float: ("a number", "numbers")}


def expected(field: FieldInfo) -> str:
    """Describe what a field accepts, such as "a whole number of at least 1, or null"."""
    return type_in_words(field.annotation, field.metadata)


def type_in_words(kind: Any, metadata: Iterable[Any] = (), *, plural: bool = False) -> str:
    """Describe a type annotation; `metadata` contains its bounds."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return type_in_words(args[0], [*_flat(args[1:]), *metadata], plural=plural)
    if origin is Literal:
        return (("any" if plural else "one") + " of " if len(args) > 1 else "") + ", ".join(map(str, args))
    if origin in (Union, types.UnionType):
        parts = [type_in_words(arg, metadata) for arg in args]
        return (", or " if any(" " in part for part in parts[:-1]) else " or ").join(parts)
    if origin is list:
        return f"{'lists' if plural else 'a list'} of {type_in_words(args[0], plural=True)}"
    if origin is tuple:
        return f"{'lists' if plural else 'a list'} of {len(args)} {type_in_words(args[0], plural=True)}"
    if origin is dict:
        return (
            "a mapping of names to "
            f"{'mappings' if get_origin(args[1]) is dict else type_in_words(args[1], plural=True)}"
        )
    if kind in _NUMBERS:
        return _NUMBERS[kind][plural] + _bounds(metadata)
    if isinstance(kind, type) and issubclass(kind, Section):
        if plural:
            return f"sections ({', '.join(kind.model_fields)})"
        return f"a section of fields ({', '.join(kind.model_fields)})"
    if kind is str and plural:
        return "names"
    return _SIMPLE.get(kind, getattr(kind, "__name__", str(kind)))


def _flat(metadata: Iterable[Any]) -> Iterable[Any]:
    for item in metadata:
        yield from _flat(item.metadata) if isinstance(item, FieldInfo) else (item,)


def _bounds(metadata: Iterable[Any]) -> str:
    bounds, words = [bound for bound in metadata if isinstance(bound, Ge | Gt | Le | Lt)], []
    match bounds:
        case [Ge(ge=low), Le(le=high)]:
            return f" from {low} to {high}"
    for bound in bounds:
        match bound:
            case Ge(ge=limit):
                words.append(f"of at least {limit}")
            case Gt(gt=limit):
                words.append(f"above {limit}")
            case Le(le=limit):
                words.append(f"of at most {limit}")
            case Lt(lt=limit):
                words.append(f"below {limit}")
    text = " and ".join(words)
    return f" {text}" if text else ""


def choices(kind: Any) -> list[str]:
    """The literal values of a type, such as ``["none", "cpu"]``; empty if it has none."""
    if get_origin(kind) is Literal:
        return [str(arg) for arg in get_args(kind)]
    if get_origin(kind) in (Union, types.UnionType, Annotated):
        return [word for arg in get_args(kind) for word in choices(arg)]
    return []


def shown(value: Any) -> str:
    """Format a value as in YAML, truncated if it is long."""
    match value:
        case None:
            text = "null"
        case bool():
            text = str(value).lower()
        case int() if value.bit_length() > 1024:  # Python writes no integer of more than 4300 decimal digits
            text = hex(value)
        case str():
            text = repr(value)
        case list() | tuple():
            text = f"[{', '.join(bare(item) for item in value)}]"
        case Section():
            return shown(value.model_dump(exclude_unset=True))
        case Mapping():
            text = f"{{{', '.join(f'{bare(key)}: {bare(item)}' for key, item in value.items())}}}"
        case _:
            text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def bare(value: Any) -> str:
    """Format a value as in YAML, strings without quotes."""
    return value if isinstance(value, str) else shown(value)


def count_of(number: int, noun: str) -> str:
    """Format a number of things: `1 rank`, `2 ranks`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
