"""Base class of the config's sections: strict, frozen, with shorthands and errors that name their field."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol, Self, cast, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, from_json

from unishard.config.relevance import OnlyWith
from unishard.errors import ConfigError, Problem, RenamedFieldWarning

CROSS_FIELD = "cross_field"
_NO_TEXT = re.compile("[\0\ud800-\udbff]|[\udc00-\udc7f]|[\udd00-\udfff]")
"""NUL and halves of surrogate pairs, but for those that stand for a byte of a path that is not UTF-8 (PEP 383)."""


class Reader(Protocol):
    """The part of `unishard.config.loading` that configs made in Python use.

    It is a layer above, so it puts itself into `Section.reader`.
    """

    def refusal(self, section: type[Section], error: ValidationError, data: Any) -> ConfigError:
        """The messages of `unishard.load` for values that a section rejects."""

    def override(self, cfg: Any, changes: Sequence[str]) -> Any:
        """A config with overrides as those of `unishard.load`."""


if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass as _Metaclass
else:
    _Metaclass = type(BaseModel)  # it has no public name


class _Refusing(_Metaclass):
    """Lets `Section(...)` raise ConfigError.

    An `__init__` would also be called by validators, and would hide their errors' places.
    """

    def __call__(cls, /, *args: object, **values: Any) -> Any:
        if args:
            message = f"{cls.__name__} takes fields by name, got {args[0]!r}; a file is loaded by unishard.load(path)"
            raise ConfigError([Problem("", message)])
        try:
            return super().__call__(**values)
        except ValidationError as error:
            raise cast(type[Section], cls).reader.refusal(cast(type[Section], cls), error, values) from None


class Section(BaseModel, metaclass=_Refusing):
    """A section of the config.

    The docstring under a field is its description in the docs, the JSON Schema and `unishard init`.
    """

    # Validators are built, and docstrings read, when they are first needed: doing both at import takes longer than a
    # translation.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)

    shorthand: ClassVar[tuple[str, ...]] = ()
    """The fields that a plain value sets: ``sharding: full_shard`` means ``sharding: {strategy: full_shard}``."""

    renamed: ClassVar[Mapping[str, str]] = {}
    """Old names of fields, which are accepted for one release, and the new ones."""

    reader: ClassVar[Reader]

    @property
    def changed(self) -> set[str]:
        """The fields that were given and differ from their default. A dump gives all fields, and must load again."""
        fields = {name: type(self).model_fields[name] for name in self.model_fields_set}
        defaults = {
            name: field.get_default(call_default_factory=True, validated_data=self.__dict__)
            for name, field in fields.items()
        }
        return {name for name, default in defaults.items() if getattr(self, name) != default}

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """Validate a mapping.

        Raises:
            ConfigError: It has invalid values. Lists every problem, as `unishard.load` does.
        """
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise cls.reader.refusal(cls, error, obj) from None

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        """Validate JSON. Raises as `model_validate` does."""
        try:
            data = from_json(json_data)
        except ValueError as error:
            raise ConfigError([Problem("", f"is not JSON: {error}")]) from None
        return cls.model_validate(data, **options)

    @classmethod
    def parse(cls, data: Any) -> Self:
        """Validate for a reader that places the errors itself.

        Raises:
            ValidationError: It has invalid values.
        """
        return super().model_validate(data)

    def __setattr__(self, name: str, value: Any) -> None:
        message = (
            "cannot be set, because a config is frozen; write cfg = cfg.override('training.seed=3'), which returns "
            "another one"
        )
        raise ConfigError([Problem(name, message)])

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copy the section; unlike pydantic's, with values that are checked.

        Args:
            update: New values by name of the field, which is not dotted: `Config.override` takes dotted fields.
            deep: Whether to copy what the fields hold.

        Raises:
            ConfigError: A value is invalid, or does not fit the others.
        """
        copied = super().model_copy(deep=deep)
        if not update:
            return copied
        return type(self).model_validate({name: getattr(copied, name) for name in self.model_fields_set} | {**update})

    @classmethod
    def expand(cls, value: Any) -> Any:
        """Expand a plain value to the fields that it sets; return anything else unchanged."""
        if not cls.shorthand or value is None or isinstance(value, Mapping | cls):
            return value
        return dict.fromkeys(cls.shorthand, value)

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse([*self._problems(), *self._unneeded()])
        return self

    def _unneeded(self) -> Iterator[tuple[str, str]]:
        """The fields that were given and decide nothing."""
        for path, needs in needs_of(type(self)).items():
            above, _, name = path.rpartition(".")
            section = value_at(self, above) if above else self
            if name in section.model_fields_set:
                unmet = [need for need in needs if need.refusal and not need.is_met(partial(value_at, self))]
                if unmet and name in section.changed:
                    yield path, unmet[0].refusal.format(self=self, field=name)

    def _problems(self) -> Iterable[tuple[str, str]]:
        """What is wrong with values that are right each by itself: ``(field, what; what instead)``."""
        return ()

    @classmethod
    @cache  # finding the source of a class takes as long as loading a config
    def descriptions(cls) -> Mapping[str, str]:
        """The docstring under each field."""
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        pairs = pairwise(body.body if isinstance(body, ast.ClassDef) else ())
        return {
            field.target.id: inspect.cleandoc(str(text.value.value))
            for field, text in pairs
            if isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and field.target.id in cls.model_fields
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        }

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in cls.descriptions().items():
            properties[name]["description"] = text
        return schema

    @field_validator("*", mode="before")
    @classmethod
    def _is_text(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse text that no path, no environment variable and no output can hold.

        A section looks at its own fields.
        """
        kind = cls.model_fields[str(info.field_name)].annotation
        section = items_of(kind) or kind
        if not (isinstance(section, type) and issubclass(section, Section)) and any(
            map(_NO_TEXT.search, _texts(value))
        ):
            raise PydanticCustomError("text", "contains a NUL character or half of a surrogate pair; remove it")
        return value

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


def _texts(value: Any) -> Iterator[str]:
    """All text in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from (*_texts(key), *_texts(item))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def renamed_note(old: str, new: str) -> str:
    """The warning for a field given under its old name."""
    return f"{old} was renamed to {new}; use the new name, the next release rejects the old one"


def refuse(problems: Iterable[tuple[str, str]]) -> None:
    """Raise all ``(field, what; what instead)`` from a validator at once; do nothing for an empty list."""
    listed = list(problems)
    if listed:
        _refuse(listed)


def _refuse(problems: list[tuple[str, str]]) -> NoReturn:
    text = "; ".join(f"{field}: {what}" for field, what in problems)
    raise PydanticCustomError(CROSS_FIELD, "{text}", {"text": text, "problems": problems})


def leaves(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield ``(dotted path, field)`` for every field that holds a value, in the order of the schema."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from leaves(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, field


@cache
def needs_of(section: type[Section]) -> Mapping[str, tuple[OnlyWith, ...]]:
    """What each field needs, all of it, as far as the section holds it; all paths begin at the section."""
    return {
        path: tuple(
            need
            for need in (mark.beside(path) for mark in field.metadata if isinstance(mark, OnlyWith))
            if all(switch.split(".")[0] in section.model_fields for switch in need.when)
        )
        for path, field in leaves(section)
    }


def items_of(kind: Any) -> type[Section] | None:
    """The section type of a list's items; None for any other type."""
    (item,) = get_args(kind) if get_origin(kind) is list else (None,)
    return item if isinstance(item, type) and issubclass(item, Section) else None


def value_at(section: Section, path: str) -> Any:
    """The value at a dotted path, such as ``training.seed``."""
    return attrgetter(path)(section)
