"""The optimizer and its parameter groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from unishard.config.patterns import Pattern
from unishard.config.relevance import Not, OffAt, OnlyWith
from unishard.config.section import Section
from unishard.config.spellings import Spellings, lower, pair

Fraction = Annotated[float, Field(ge=0, lt=1)]


_ADAM = ("adamw", "adam")


def _of(*names: str, why: str = "the optimizer has none") -> OnlyWith:
    words = f"{', '.join(names[:-1])} and {names[-1]}" if names[1:] else names[0]
    refusal = f"belongs to {words}, not to {{self.name}}; remove it or set optimizer.name to {names[0]}"
    return OnlyWith({"name": names}, why, refusal)


_SGD_OR_MUON = _of("sgd", "muon", why="only sgd and muon have it")
_MUON = _of("muon", why="only muon has it")
_DECAYING = OnlyWith(
    {"weight_decay": Not(0.0)},
    "there is no weight decay",
    "is unused without weight decay; set optimizer.weight_decay or remove it",
)

_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "betas": {"lion": (0.9, 0.99)},
    "eps": {"adagrad": 1e-10},
    "momentum": {"muon": 0.95},
    "nesterov": {"muon": True},
    "weight_decay": {"adamw": 0.01, "adamw_8bit": 0.01, "muon": 0.1},
}


def _default(field: str, otherwise: Any) -> Callable[[dict[str, Any]], Any]:
    """The default in the library of the named optimizer."""
    return lambda values: _DEFAULTS[field].get(values.get("name", ""), otherwise)


class ParameterGroup(Section):
    """Parameters with their own learning rate or weight decay."""

    params: list[Pattern] = Field(default=[])
    """Which parameters: patterns as in `no_decay`. A parameter belongs to the first group with a matching pattern."""
    lr: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Their learning rate, before the schedule; `null` for `optimizer.lr`."""
    weight_decay: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Their weight decay, which overrides `no_decay`; `null` for the value that they have without this group."""

    def _problems(self) -> Iterator[tuple[str, str]]:
        if not self.params:
            yield "params", "is empty; name at least one pattern, such as embed"
        if self.lr is None and self.weight_decay is None:
            yield "lr", "and weight_decay are both missing, so the group changes nothing; write one of them"


class Optimizer(Section):
    """The torch optimizer that `prepare` builds when it is not given an optimizer or a factory."""

    shorthand: ClassVar[tuple[str, ...]] = ("name",)

    name: Annotated[
        Literal["adamw", "adam", "sgd", "adagrad", "lion", "muon", "adamw_8bit"], BeforeValidator(lower), Spellings()
    ] = Field(default="adamw")
    """`adamw` (decoupled weight decay), `adam` (weight decay added to the gradient), `sgd` and `adagrad` are torch's,
    fused where torch supports it; `lion` comes from the package lion-pytorch (the extra `optimizers`); `muon` is
    torch's Muon for `matrices`, on shards, and `adamw` for all other parameters; `adamw_8bit` is AdamW with
    moments of 8 bits, by the kernels of bitsandbytes (the extra `adamw8bit`)."""
    lr: float = Field(default=1e-3, ge=0, allow_inf_nan=False)
    """Learning rate, before the schedule; with `muon` that of its matrices."""
    betas: Annotated[tuple[Fraction, Fraction], BeforeValidator(pair), _of(*_ADAM, "adamw_8bit", "lion", "muon")] = (
        Field(default_factory=_default("betas", (0.9, 0.999)))
    )
    """Decay rates of the moments, of `adamw`, `adamw_8bit` and `adam` (default 0.9, 0.999) and `lion` (default 0.9,
    0.99), and of what AdamW updates beside `muon`."""
    eps: Annotated[float, _of(*_ADAM, "adamw_8bit", "adagrad", "muon")] = Field(
        default_factory=_default("eps", 1e-8), ge=0, allow_inf_nan=False
    )
    """Term added to the denominator, of `adamw`, `adamw_8bit` and `adam` (default 1e-8) and `adagrad` (default
    1e-10), and of what AdamW updates beside `muon`."""
    amsgrad: Annotated[bool, _of(*_ADAM)] = Field(default=False)
    """Whether `adamw` and `adam` divide by the largest second moment so far."""
    momentum: Annotated[float, _SGD_OR_MUON] = Field(
        default_factory=_default("momentum", 0.0), ge=0, allow_inf_nan=False
    )
    """The momentum factor of `sgd` (default 0) and of the matrices of `muon` (default 0.95)."""
    nesterov: Annotated[bool, _SGD_OR_MUON] = Field(default_factory=_default("nesterov", False))
    """Whether `sgd` (default false) and `muon` (default true) use Nesterov momentum."""
    matrices: Annotated[Literal["auto"] | list[Pattern], _MUON] = Field(default="auto")
    """Parameters that `muon` updates as matrices, of two dimensions, or of three: a matrix for each index of the first,
    as in fused experts. `auto`: weights of these dimensions in units, the repeated blocks of the model, without
    embeddings and convolutions; or patterns as in `no_decay`. AdamW updates all others."""
    adamw_lr: Annotated[float | None, _MUON] = Field(default=None, ge=0, allow_inf_nan=False)
    """Learning rate of the parameters that AdamW updates beside `muon`, before the schedule; `null` for `lr`."""
    adjust_lr: Annotated[Literal["original", "match_rms_adamw"], _MUON] = Field(default="original")
    """How `muon` adjusts its rate to an m x n matrix, as torch's `adjust_lr_fn`: `original` multiplies it by
    sqrt(max(1, m / n)), `match_rms_adamw` by 0.2 * sqrt(max(m, n)), so that rates of AdamW fit."""
    ns_steps: Annotated[int, _MUON] = Field(default=5, ge=1, lt=100)
    """Newton-Schulz iterations of `muon`."""
    ns_dtype: Annotated[Literal["bf16", "fp32"], _MUON] = Field(default="bf16")
    """Dtype of these iterations, and in which matrices are sent to the rank that makes them: `bf16`, as in torch, or
    `fp32`, which is exact on any number of ranks."""
    weight_decay: float = Field(default_factory=_default("weight_decay", 0.0), ge=0, allow_inf_nan=False)
    """Weight decay of every trainable parameter that is not exempt below; by default 0.01 with `adamw` and
    `adamw_8bit`, 0.1 with `muon`, else 0."""
    no_decay: Annotated[list[Pattern], _DECAYING] = Field(default=[])
    """Parameters without weight decay: regular expressions that match anywhere in a parameter's name (`re.search`),
    such as `[bias, norm]`. One that matches no trainable parameter is a warning, such as `norm` with
    LoRA, and it is an error if none matches any parameter."""
    groups: Annotated[list[ParameterGroup], OffAt([])] = Field(default=[])
    """Parameters with their own learning rate or weight decay: `[{params: [embed], lr: 1e-4}]`. The schedule multiplies
    the rate of each group."""

    def _problems(self) -> Iterator[tuple[str, str]]:
        if self.nesterov and self.name == "sgd" and not self.momentum:
            yield "nesterov", "needs a momentum; set optimizer.momentum, such as 0.9"
        if self.name == "lion" and not all(
            rate is None or rate > 0 for rate in (self.lr, *(group.lr for group in self.groups))
        ):
            yield "lr", "must be above 0 with lion; write a positive rate, or freeze the parameters"
