"""Whether the model is compiled, and how."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from unishard.config.relevance import OffAt, OnlyWith
from unishard.config.section import Section
from unishard.config.spellings import Spellings, lower

_COMPILED = OnlyWith(
    {"mode": {"per_block", "full"}},
    "nothing is compiled",
    "is unused: nothing is compiled; remove it or set compile.mode to per_block",
)


class Compile(Section):
    """`torch.compile`, in place: names of modules and parameters do not change."""

    shorthand: ClassVar[tuple[str, ...]] = ("mode",)

    mode: Annotated[Literal["none", "per_block", "full"], BeforeValidator(lower), Spellings(), OffAt("none")] = Field(
        default="none"
    )
    """`per_block` compiles the model's repeated blocks; their common code is compiled once. `full` compiles the whole
    model, with a graph break wherever the engine gathers a unit."""
    backend: Annotated[str, _COMPILED] = Field(default="inductor")
    """torch.compile's backend: `inductor` generates kernels (on the CPU it needs a C++ compiler); `aot_eager` and
    `eager` only trace, which helps to find graph breaks."""
