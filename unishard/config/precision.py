"""In which number formats the model computes and the gradients travel."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from unishard.config.section import Section, refuse
from unishard.config.spelling import Spellings

__all__ = ["DType", "Precision"]

_ALIASES = {"bfloat16": "bf16", "bf16-mixed": "bf16", "float32": "fp32", "float": "fp32", "32-true": "fp32"}


def _dtype(value: Any) -> Any:
    return _ALIASES.get(value.lower(), value.lower()) if isinstance(value, str) else value


DType = Annotated[Literal["fp32", "bf16"], BeforeValidator(_dtype), Spellings(tuple(_ALIASES))]


class Precision(Section):
    """Number formats. Master weights, optimizer state and accumulated gradients are fp32, and buffers keep their dtype."""

    shorthand: ClassVar[tuple[str, ...]] = ("compute",)

    compute: DType = Field(default="fp32")
    """Format of parameters and activations in forward and backward. `bf16` keeps fp32 master weights beside the bf16 copy."""
    reduce: DType = Field(default="fp32")
    """Format in which gradients are summed over the ranks. `bf16` halves the traffic and loses small gradients."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.compute == "fp32" and self.reduce == "bf16":
            refuse([("reduce", "bf16 would round the fp32 gradients; write fp32, or set precision.compute to bf16")])
        return self
