"""Base class of the config's sections: strict, frozen, with shorthands and errors that name their field."""

from __future__ import annotations

import ast
import inspect
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, ClassVar, NoReturn, get_args, get_origin

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ModelWrapValidatorHandler, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError

from unishard.errors import RenamedFieldWarning

__all__ = ["CROSS_FIELD", "Section", "items_of", "leaves", "refuse", "renamed_note", "value_at"]

CROSS_FIELD = "cross_field"


class Section(BaseModel):
    """A section of the config. The docstring under a field is its description in the docs, the JSON Schema and `unishard init`."""

    # Validators are built, and docstrings read, when they are first needed: doing both at import takes longer than a translation.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)

    shorthand: ClassVar[tuple[str, ...]] = ()
    """The fields that a plain value sets: ``sharding: full_shard`` means ``sharding: {strategy: full_shard}``."""

    renamed: ClassVar[Mapping[str, str]] = {}
    """Old names of fields, which are accepted for one release, and the new ones."""

    @classmethod
    def expand(cls, value: Any) -> Any:
        """Expand a plain value to the fields that it sets; return anything else unchanged."""
        if not cls.shorthand or value is None or isinstance(value, Mapping | cls):
            return value
        return dict.fromkeys(cls.shorthand, value)

    @classmethod
    def descriptions(cls) -> Mapping[str, str]:
        """The docstring under each field."""
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        pairs = pairwise(body.body if isinstance(body, ast.ClassDef) else ())
        return {
            field.target.id: inspect.cleandoc(str(text.value.value))
            for field, text in pairs
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.target.id in cls.model_fields
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        }

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in cls.descriptions().items():
            properties[name]["description"] = text
        return schema

    @model_validator(mode="wrap")
    @classmethod
    def _expand_shorthand(cls, value: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        value = cls.expand(value)
        return handler(cls._current(value) if cls.renamed and isinstance(value, Mapping) else value)

    @classmethod
    def _current(cls, value: Mapping[str, Any]) -> Mapping[str, Any]:
        """The fields under their current names; warns about an old one."""
        for old, new in cls.renamed.items():
            if old in value:
                if new in value:
                    refuse([(old, f"is the old name of {new}, which is set too; remove {old}")])
                warnings.warn(f"{cls.__name__}: {renamed_note(old, new)}", RenamedFieldWarning, stacklevel=2)
                value = {new if key == old else key: item for key, item in value.items()}
        return value


def renamed_note(old: str, new: str) -> str:
    """The warning for a field given under its old name."""
    return f"{old} was renamed to {new}; use the new name, the next release rejects the old one"


def refuse(problems: Iterable[tuple[str, str]]) -> None:
    """Raise all ``(field, what; what instead)`` from a validator at once; do nothing for an empty list."""
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
    """The section type of a list's items; None for any other type."""
    (item,) = get_args(kind) if get_origin(kind) is list else (None,)
    return item if isinstance(item, type) and issubclass(item, Section) else None


def value_at(section: Section, path: str) -> Any:
    """The value at a dotted path, such as ``training.seed``."""
    value: Any = section
    for name in path.split("."):
        value = getattr(value, name)
    return value
