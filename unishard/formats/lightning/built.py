"""A class and its arguments, as LightningCLI writes them: `class_path` and `init_args`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from unishard.contract.entries import Path

CLASS = "class_path"
"""The key that names a class."""
ARGUMENTS = ("init_args", "dict_kwargs")
"""Sections with its arguments."""


class Built(NamedTuple):
    """A class and its arguments."""

    path: str
    key: str
    """`class_path`; empty where only a name stands."""
    arguments: Mapping[str, Any]
    inside: Mapping[str, Path]
    """Where each argument stands below it."""
    others: tuple[str, ...] = ()
    """Keys beside the class and its section of arguments."""


def built(value: Any) -> Built | None:
    """A class with arguments, or only its name; None for anything else."""
    if isinstance(value, str) and value:
        return Built(value, "", {}, {})
    if not isinstance(value, Mapping) or not isinstance(value.get(CLASS), str):
        return None
    beside = {str(name): item for name, item in value.items() if name not in (CLASS, *ARGUMENTS)}
    sections = [word for word in ARGUMENTS if word in value]
    if not sections:
        return Built(value[CLASS], CLASS, beside, dict.fromkeys(beside, ()))
    arguments: dict[str, Any] = {}
    inside: dict[str, Path] = {}
    for section_name in sections:
        section = value[section_name] if isinstance(value[section_name], Mapping) else {}
        arguments |= {str(name): item for name, item in section.items()}
        inside |= dict.fromkeys(map(str, section), (section_name,))
    return Built(value[CLASS], CLASS, arguments, inside, tuple(beside))


def short(path: Any) -> str:
    """The last word of a dotted name, such as a class without its module."""
    return str(path).rpartition(".")[2]
