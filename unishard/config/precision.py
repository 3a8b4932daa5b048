"""In which number formats the model computes, its weights are kept and the gradients travel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from unishard.config.aliases import Spellings
from unishard.config.section import Section, refuse

__all__ = ["DType", "Precision"]

_ALIASES = {
    "bfloat16": "bf16",
    "bf16-mixed": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "fp16-mixed": "fp16",
    "16-mixed": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "32-true": "fp32",
}
_PURE = {"bf16-true": "bf16", "fp16-true": "fp16", "16-true": "fp16"}
"""What other tools call training without fp32 masters, which takes two fields here."""


def _dtype(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    word = value.lower()
    if word in _PURE:
        raise PydanticCustomError(
            "pure",
            "{word} means weights and optimizer state in {dtype} as well; write compute: {dtype} and master: {dtype} below precision, "
            "or {dtype} alone for fp32 masters",
            {"word": word, "dtype": _PURE[word]},
        )
    return _ALIASES.get(word, word)


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


DType = Annotated[Literal["fp32", "bf16", "fp16"], BeforeValidator(_dtype), Spellings(tuple(_ALIASES))]


def _as_master(validated: dict[str, Any]) -> Any:
    return validated.get("master", "fp32")


class Precision(Section):
    """Number formats. By default the master weights, the optimizer state, and the sums of gradients are fp32."""

    shorthand: ClassVar[tuple[str, ...]] = ("compute",)

    compute: DType = Field(default="fp32")
    """Format of parameters and activations in forward and backward; floating-point inputs are cast to it. `fp16` scales the loss."""
    master: DType = Field(default="fp32")
    """Format of the weights that the optimizer updates, and of its state. `fp32` keeps masters beside a `bf16` or `fp16` copy, also of a
    model that was loaded in another format. The format of `compute` keeps none: less memory, and small updates are lost."""
    reduce: DType = Field(default="fp32")
    """Format in which gradients are summed over the ranks. `bf16` or `fp16` halves the traffic and loses small gradients."""
    accumulate: DType = Field(default_factory=_as_master)
    """Format in which the gradients of an accumulation window are added up; that of `master` unless stated."""
    buffers: Annotated[Literal["keep", "fp32", "bf16", "fp16"], BeforeValidator(_lower), Spellings()] = Field(default="keep")
    """Format to which floating-point buffers, such as rotary tables, are cast at prepare; `keep` leaves them as they are."""
    loss_scale: Literal["dynamic"] | Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(default="dynamic")
    """What the loss is multiplied by before backward in fp16, and the gradients divided by after it. `dynamic` halves it when a gradient
    is not finite and doubles it after `loss_scale_growth_interval` updates in a row, as `torch.amp.GradScaler` does. A number stays."""
    initial_loss_scale: float = Field(default=65536.0, gt=0, allow_inf_nan=False)
    """Where a dynamic loss scale begins."""
    loss_scale_growth_interval: int = Field(default=2000, ge=1)
    """Updates without a skipped one after which a dynamic loss scale doubles."""

    @property
    def pure(self) -> bool:
        """Whether there are no fp32 masters: the optimizer updates what the model computes with."""
        return self.master == self.compute != "fp32"

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse([*self._formats(), *self._scaling()])
        return self

    def _formats(self) -> Iterator[tuple[str, str]]:
        if self.master not in ("fp32", self.compute):
            yield "master", f"{self.master} is neither fp32 nor the format of compute; write fp32, or {self.compute} for no masters"
        if self.reduce not in ("fp32", self.compute):
            yield (
                "reduce",
                f"{self.reduce} would round the {self.compute} gradients; write fp32, or set precision.compute to {self.reduce}",
            )
        if self.pure and self.accumulate != self.master:
            yield "accumulate", f"gradients have the format of the weights, {self.master}; remove it, or set precision.master to fp32"
        elif self.accumulate not in ("fp32", self.compute):
            yield (
                "accumulate",
                f"{self.accumulate} would round the {self.compute} gradients; write fp32, or set precision.compute to {self.accumulate}",
            )

    def _scaling(self) -> Iterator[tuple[str, str]]:
        given = [name for name in ("loss_scale", "initial_loss_scale", "loss_scale_growth_interval") if name in self.model_fields_set]
        for name in given:
            if self.compute != "fp16":
                yield name, f"has no meaning with compute {self.compute}, whose gradients need no scale; remove it or choose fp16"
            elif name != "loss_scale" and self.loss_scale != "dynamic":
                yield name, f"has no meaning with a loss_scale of {self.loss_scale:g}, which stays; remove it or write loss_scale: dynamic"
