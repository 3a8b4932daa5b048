"""Turn the validator's errors into messages for people."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple, get_args

from pydantic import ConfigDict, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_core.core_schema import ErrorType
from ruamel.yaml import YAML

from unishard.config import CROSS_FIELD, Config, Section, items_of
from unishard.config.describe import choices, expected, shown, type_in_words
from unishard.config.hints import IN_SCRIPT, VALUES
from unishard.config.loading.origins import Keys, Origin

_BUILT_IN = frozenset(get_args(ErrorType))
_CLOSE, _VERY_CLOSE = 0.7, 0.8
_ELSEWHERE = {
    "learning_rate": "optimizer.lr",
    "max_grad_norm": "training.gradient_clipping",
    "clip_grad_norm": "training.gradient_clipping",
    "per_device_train_batch_size": "training.micro_batch_size",
    "train_micro_batch_size_per_gpu": "training.micro_batch_size",
    "train_batch_size": "training.global_batch_size",
    "batch_size": "training.micro_batch_size",
    "zero_optimization": "sharding.strategy",
    "sharding_strategy": "sharding.strategy",
    "stage": "sharding.strategy",
    "mixed_precision": "precision.compute",
    "bf16": "precision.compute",
    "fp16": "precision.compute",
    "initial_scale_power": "precision.initial_loss_scale",
    "loss_scale_window": "precision.loss_scale_growth_interval",
    "growth_interval": "precision.loss_scale_growth_interval",
    "init_scale": "precision.initial_loss_scale",
    "param_dtype": "precision.compute",
    "reduce_dtype": "precision.reduce",
    "buffer_dtype": "precision.buffers",
    "tf32": "precision.matmul",
    "allow_tf32": "precision.matmul",
    "float32_matmul_precision": "precision.matmul",
    "grad_accum_dtype": "precision.accumulate",
    "communication_data_type": "precision.reduce",
    "cpu_offload": "offload",
    "engine": "backend",
}
"""Other tools' names of fields, and the fields here."""


class Finding(NamedTuple):
    """An error and its place."""

    path: Keys
    what: str
    place: Origin | None = None
    """Where it is; None for the place of its path."""
    of_value: bool = False
    """Whether only the value is wrong, so that an override fixes it."""


def dotted(path: Keys) -> str:
    """Format a path as ``sharding.units[0]``."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


def findings_of(error: ValidationError, data: Any, root: type[Section] = Config) -> Iterator[Finding]:
    """Yield one finding for each field that the schema, or one section of it, rejects."""
    seen = set()
    for raw in error.errors(include_url=False):
        if raw["type"] == CROSS_FIELD:
            for name, message in raw["ctx"]["problems"]:
                yield Finding((*raw["loc"], *name.split(".")), message)
            continue
        path, kind = _resolve(raw["loc"], root)
        # A default that depends on another field, which has its own finding.
        if path in seen or raw["type"] == "default_factory_not_called":
            continue
        seen.add(path)
        if kind is None:
            yield Finding(path, unknown(path[:-1], str(path[-1]), root))
        elif raw["type"] not in _BUILT_IN:
            yield Finding(path, raw["msg"])
        else:
            yield Finding(path, _mismatch(kind, _given(data, path, root)))


def _resolve(loc: Keys, section: type[Section]) -> tuple[Keys, FieldInfo | type[Section] | None]:
    """Resolve a validator location to the path of its field, and to the field, the section, or None if there is
    none.
    """
    depth = 0
    while depth < len(loc):
        field = section.model_fields.get(str(loc[depth]))
        depth += 1
        if field is None:
            return loc[:depth], None
        if (item := items_of(field.annotation)) and depth < len(loc):
            section, depth = item, depth + 1
        elif isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            section = field.annotation
        else:
            return loc[:depth], field
    return loc, section


def _given(data: Any, path: Keys, root: type[Section]) -> Any:
    """The document's value at a path, with shorthands expanded."""
    section: Any = root
    for name in path:
        data = data[name]
        section = section if isinstance(name, int) else section.model_fields[name].annotation
        item = items_of(section)
        if item is None and isinstance(section, type) and issubclass(section, Section):
            data = section.expand(data)
        section = item or section
    return data


def _mismatch(kind: FieldInfo | type[Section], value: Any) -> str:
    if not isinstance(kind, FieldInfo):
        if value is None:
            return f"is empty; write fields below it ({', '.join(kind.model_fields)}) or remove it"
        return f"must be {type_in_words(kind)}, got {_got(value)}"
    hint = _hint(kind, value)
    return f"must be {expected(kind)}, got {_got(value, words=bool(choices(kind.annotation)))}" + (
        f"; {hint}" if hint else ""
    )


def _got(value: Any, *, words: bool = False) -> str:
    match value:
        case str():
            return shown(value) + ("" if words else " (text)")
        case list():
            return f"{shown(value)} (a list)"
        case Mapping():
            return f"{shown(value)} (a mapping)"
    return shown(value)


def _hint(field: FieldInfo, value: Any) -> str:
    """A suggestion, if the intended value can be guessed."""
    if isinstance(value, str):
        if VALUES.get(value.lower()) in choices(field.annotation):
            return f"write {VALUES[value.lower()]}"
        near = get_close_matches(value.lower(), choices(field.annotation), 1, _CLOSE)
        if near:
            return f"did you mean {near[0]!r}?"
    kind: Any = field.annotation
    probe = create_model("Probe", __config__=ConfigDict(strict=True), value=(kind, field))
    for candidate, advice in _readings(value):
        try:
            probe.model_validate({"value": candidate})
        except ValidationError:
            continue
        return advice
    return "write a value or remove the line" if value is None else ""


def _readings(value: Any) -> Iterator[tuple[Any, str]]:
    """Yield values that may have been meant, with advice."""
    match value:
        case None:
            yield "none", "write none"
        case float() if value.is_integer():
            yield int(value), f"write {int(value)}"
        case str():
            text = value.strip().lower()
            for number in (int, float):
                try:
                    meant = number(text)
                except ValueError:
                    continue
                if not math.isfinite(meant):
                    continue
                # Python accepts digits of every script as numbers, YAML only ASCII digits.
                yield meant, f"write {text} without quotes" if _in_yaml(text) == meant else f"write {shown(meant)}"
            if text in ("true", "yes", "on"):
                yield True, "write true"
            if text in ("false", "no", "off"):
                yield False, "write false"
            if text in ("none", "null", ""):
                yield None, "write null"
            yield [value], f"write [{value}]" if len(value) <= 60 else "write it in a list"


def _in_yaml(text: str) -> Any:
    return YAML(typ="safe", pure=True).load(text)


def unknown(section: Keys, name: str, root: type[Section] = Config) -> str:
    """The message for an unknown field, with the closest match."""
    kind: Any = root
    for key in section:
        if not isinstance(key, int):
            kind = kind.model_fields[key].annotation
            kind = items_of(kind) or kind
    wanted, paths = name.lower(), list(paths_of(root))
    if "." in wanted and wanted in paths:
        outer, _, inner = wanted.rpartition(".")
        return (
            "is a dotted name, which only an override has; write "
            f"{outer.replace('.', ': {')}: {{{inner}: ...}}{'}' * outer.count('.')}"
        )
    if section and wanted.isdecimal():
        return f"is a number in the place of a field; write a number with a point, such as 0.{wanted}"
    if wanted in IN_SCRIPT:
        return f"unknown field, which {IN_SCRIPT[wanted]}"
    meant = (
        get_close_matches(wanted, kind.model_fields, 1, _CLOSE) if any(isinstance(key, int) for key in section) else []
    )
    if not meant:
        meant = [path for path in paths if path.rpartition(".")[2] == wanted]
    if not meant and wanted in _ELSEWHERE:
        here = _ELSEWHERE[wanted].rpartition(".")[2]
        meant = [here if here in kind.model_fields else _ELSEWHERE[wanted]]
    if not meant:
        meant = get_close_matches(wanted, kind.model_fields, 1, _CLOSE)
    if not meant:
        near = get_close_matches(wanted, [path.rpartition(".")[2] for path in paths], 1, _VERY_CLOSE)
        meant = [path for path in paths if path.rpartition(".")[2] in near]
    if not meant:
        return f"unknown field; known here: {', '.join(kind.model_fields)}"
    return f"unknown field; did you mean {' or '.join(map(repr, meant))}?"


def paths_of(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Every field below a section, with its dotted name."""
    for name, field in section.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from paths_of(field.annotation, f"{prefix}{name}.")
