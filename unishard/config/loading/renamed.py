"""Fields that have a new name: the old one is accepted for one release, with a warning that names both."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from unishard.config import Config, Section
from unishard.config.loading.origins import OVERRIDE, Keys, Origins
from unishard.config.section import renamed_note
from unishard.errors import RenamedFieldWarning


def _renamed(section: type[Section], prefix: str = "") -> Iterator[tuple[str, str]]:
    yield from ((prefix + old, prefix + new) for old, new in section.renamed.items())
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _renamed(field.annotation, f"{prefix}{name}.")


RENAMED: Mapping[str, str] = dict(_renamed(Config))
"""Old dotted path of each renamed field, and its new one. The sections of the schema say which (`Section.renamed`)."""


def current_change(change: str) -> str:
    """A `field=value` change with the field's current name; warns about an old one."""
    field, equals, value = change.partition("=")
    new = RENAMED.get(field.strip())
    if new is None:
        return change
    _warn(field.strip(), new, str(OVERRIDE))
    return f"{new}{equals}{value}"


def current_names(data: Any, origins: Origins) -> Any:
    """The data of a document under the current names; warns about each old one, with its line.

    A field that is given under both names stays as it is: the schema refuses it.

    Args:
        data: What the document holds; stays as it is.
        origins: The place of each key. A renamed key is noted under its new name too.
    """
    for old, new in RENAMED.items():
        *above, name = old.split(".")
        current, section = new.rpartition(".")[2], data
        for key in above:
            section = section.get(key) if isinstance(section, Mapping) else None
        if isinstance(section, Mapping) and name in section and current not in section:
            place = origins.of(old)
            _warn(old, new, str(place))
            origins.add((*above, current), place)
            data = _replaced(
                data, tuple(above), {current if key == name else key: value for key, value in section.items()}
            )
    return data


def _replaced(data: Any, keys: Keys, section: Mapping[str, Any]) -> Any:
    """The data with another section at a path."""
    if not keys:
        return section
    return {key: _replaced(value, keys[1:], section) if key == keys[0] else value for key, value in data.items()}


def _warn(old: str, new: str, where: str) -> None:
    warnings.warn(
        f"{where}: {renamed_note(old, new)}" if where else renamed_note(old, new), RenamedFieldWarning, stacklevel=3
    )
