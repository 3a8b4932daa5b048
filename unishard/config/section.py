"""What every section of the config has in common: strictness, frozenness, shorthands and how errors name their field."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, NoReturn, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

__all__ = ["CROSS_FIELD", "Section", "items_of", "leaves", "refuse", "value_at"]

CROSS_FIELD = "cross_field"


class Section(BaseModel):
    """A part of the config. The docstring under a field is its description everywhere: help, MAPPING.md and JSON Schema."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    shorthand: ClassVar[tuple[str, ...]] = ()
    """The fields that a bare value stands for: ``sharding: full_shard`` means ``sharding: {strategy: full_shard}``."""

    @classmethod
    def expand(cls, value: Any) -> Any:
        """A bare value as the fields that it stands for; anything else as it is."""
        if not cls.shorthand or value is None or isinstance(value, Mapping | cls):
            return value
        return dict.fromkeys(cls.shorthand, value)

    @model_validator(mode="wrap")
    @classmethod
    def _expand_shorthand(cls, value: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        return handler(cls.expand(value))


def refuse(problems: Iterable[tuple[str, str]]) -> None:
    """Raise all ``(field, what; what instead)`` at once from a validator; do nothing when there are none."""
    found = list(problems)
    if found:
        _refuse(found)


def _refuse(found: list[tuple[str, str]]) -> NoReturn:
    text = "; ".join(f"{field}: {what}" for field, what in found)
    raise PydanticCustomError(CROSS_FIELD, "{text}", {"text": text, "problems": found})


def leaves(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield ``(dotted path, field)`` for every field that holds a value, in the order of the schema."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from leaves(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def items_of(kind: Any) -> type[Section] | None:
    """The section that a list holds many of; None for every other type."""
    (item,) = get_args(kind) if get_origin(kind) is list else (None,)
    return item if isinstance(item, type) and issubclass(item, Section) else None


def value_at(section: Section, path: str) -> Any:
    """The value at a dotted path, such as ``training.seed``."""
    value: Any = section
    for name in path.split("."):
        value = getattr(value, name)
    return value
