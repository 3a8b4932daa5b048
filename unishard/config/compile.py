"""Whether the model is compiled, and how."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from unishard.config.relevance import OffAt, UnusedIf
from unishard.config.section import Section, refuse
from unishard.config.spellings import Spellings, lower


class Compile(Section):
    """`torch.compile`, in place: names of modules and parameters do not change."""

    shorthand: ClassVar[tuple[str, ...]] = ("mode",)
    unused_if: ClassVar[tuple[UnusedIf, ...]] = (
        UnusedIf(lambda cfg: cfg.compile.mode == "none", "nothing is compiled"),
    )

    mode: Annotated[Literal["none", "per_block", "full"], BeforeValidator(lower), Spellings(), OffAt("none")] = Field(
        default="none"
    )
    """`per_block` compiles the model's repeated blocks; their common code is compiled once. `full` compiles the whole
    model, with a graph break wherever the engine gathers a unit."""
    backend: str = Field(default="inductor")
    """torch.compile's backend: `inductor` generates kernels (on the CPU it needs a C++ compiler); `aot_eager` and
    `eager` only trace, which helps to find graph breaks."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.mode == "none" and "backend" in self.changed:
            refuse([("backend", "is unused: nothing is compiled; remove it or set compile.mode to per_block")])
        return self
