"""The optimizer, and which parameters it treats differently."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from unishard.config.aliases import Spellings
from unishard.config.section import Section, refuse

__all__ = ["Optimizer", "ParameterGroup"]

Fraction = Annotated[float, Field(ge=0, lt=1)]


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _pair(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise PydanticCustomError(
            "pattern",
            "holds {value}, which is no regular expression ({error}); write a part of a parameter's name",
            {"value": repr(value), "error": str(error)},
        ) from None
    if not value:
        raise PydanticCustomError("pattern", "holds an empty pattern, which matches everything; write a part of a parameter's name")
    return value


Pattern = Annotated[str, AfterValidator(_pattern)]

_ADAM = ("adamw", "adam")
_BELONGS = {
    "betas": (*_ADAM, "lion"),
    "eps": (*_ADAM, "adagrad"),
    "amsgrad": _ADAM,
    "momentum": ("sgd",),
    "nesterov": ("sgd",),
}
"""Fields that not every optimizer has, and which do."""

_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "betas": {"lion": (0.9, 0.99)},
    "eps": {"adagrad": 1e-10},
    "weight_decay": {"adamw": 0.01},
}


def _default(field: str, otherwise: Any) -> Callable[[dict[str, Any]], Any]:
    """The default of the optimizer that is named, which is that of its own library."""
    return lambda given: _DEFAULTS[field].get(given.get("name", ""), otherwise)


class ParameterGroup(Section):
    """Parameters that are trained with another learning rate or weight decay."""

    params: list[Pattern] = Field(default_factory=list)
    """Which parameters: patterns as in `no_decay`. The first section with a pattern that matches a parameter takes it."""
    lr: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Their learning rate, before the schedule; `null` for `optimizer.lr`."""
    weight_decay: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Their weight decay, also of those that `no_decay` matches; `null` for what they would have without this section."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems: list[tuple[str, str]] = []
        if not self.params:
            problems.append(("params", "is empty; name at least one pattern, such as embed"))
        if self.lr is None and self.weight_decay is None:
            problems.append(("lr", "is not there, and weight_decay is neither, so nothing differs in this group; write one of them"))
        refuse(problems)
        return self


class Optimizer(Section):
    """The torch optimizer that `prepare` builds, unless it is given one, or a factory."""

    shorthand: ClassVar[tuple[str, ...]] = ("name",)

    name: Annotated[Literal["adamw", "adam", "sgd", "adagrad", "lion"], BeforeValidator(_lower), Spellings()] = Field(default="adamw")
    """`adamw` (decoupled weight decay), `adam` (weight decay added to the gradient), `sgd` and `adagrad` are torch's, fused where
    torch can; `lion` is that of the package lion-pytorch (the extra `optimizers`)."""
    lr: float = Field(default=1e-3, ge=0, allow_inf_nan=False)
    """Learning rate, before the schedule."""
    betas: Annotated[tuple[Fraction, Fraction], BeforeValidator(_pair)] = Field(default_factory=_default("betas", (0.9, 0.999)))
    """Decay rates of the moments, of `adamw` and `adam` (default 0.9, 0.999) and `lion` (default 0.9, 0.99)."""
    eps: float = Field(default_factory=_default("eps", 1e-8), ge=0, allow_inf_nan=False)
    """Term added to the denominator, of `adamw` and `adam` (default 1e-8) and `adagrad` (default 1e-10)."""
    amsgrad: bool = Field(default=False)
    """Whether `adamw` and `adam` divide by the largest second moment so far."""
    momentum: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """SGD's momentum factor."""
    nesterov: bool = Field(default=False)
    """Whether SGD's momentum is Nesterov's."""
    weight_decay: float = Field(default_factory=_default("weight_decay", 0.0), ge=0, allow_inf_nan=False)
    """Weight decay of every trainable parameter that nothing below exempts; by default 0.01 with `adamw`, else 0."""
    no_decay: list[Pattern] = Field(default_factory=list)
    """Parameters without weight decay: regular expressions, each looked for anywhere in a parameter's name (`re.search`), such as
    `[bias, norm]`. One that matches no trainable parameter is an error."""
    groups: list[ParameterGroup] = Field(default_factory=list)
    """Parameters with a learning rate or weight decay of their own: `[{params: [embed], lr: 1e-4}]`. The schedule multiplies the rate
    of each group."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse(self._problems())
        return self

    def _problems(self) -> Iterator[tuple[str, str]]:
        given = self.model_fields_set
        for field, names in _BELONGS.items():
            if field in given and self.name not in names:
                words = f"{', '.join(names[:-1])} and {names[-1]}" if names[1:] else names[0]
                yield field, f"belongs to {words}, not to {self.name}; remove it or set optimizer.name to {names[0]}"
        if self.nesterov and self.name == "sgd" and not self.momentum:
            yield "nesterov", "needs a momentum; set optimizer.momentum, such as 0.9"
        if self.name == "lion" and not all(rate is None or rate > 0 for rate in (self.lr, *(group.lr for group in self.groups))):
            yield "lr", "must be above 0 with lion; write a positive rate, or freeze the parameters"
        if self.no_decay and not self.weight_decay:
            yield "no_decay", "has no meaning without weight decay; set optimizer.weight_decay or remove it"
