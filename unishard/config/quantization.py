"""How the weights of a frozen base are stored."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from unishard.config.patterns import Pattern
from unishard.config.relevance import OffAt, OnlyWith
from unishard.config.section import Section
from unishard.config.spellings import Spellings, lower

FOUR_BIT = ("nf4", "fp4")

_QUANTIZED = OnlyWith(
    {"type": (*FOUR_BIT, "int8")},
    "nothing is quantized",
    "is unused: nothing is quantized; remove it or set type to nf4",
)
_FOUR_BITS = OnlyWith(
    {"type": FOUR_BIT},
    "no weight is stored in 4 bits",
    "is unused with type {self.type}, which stores no weight in 4 bits; remove it or set type to nf4",
)


class Quantization(Section):
    """QLoRA: the weights of the linear layers that `unishard.from_pretrained` loads are quantized by bitsandbytes, and
    stay frozen; adapters of peft train.

    `quantization: nf4` stands for `quantization: {type: nf4}`. The blocks are stored as bytes, which every strategy
    shards as it does any frozen parameter, on both engines, and which a checkpoint contains. `precision.compute` is the
    dtype that they are multiplied in. Needs `pip install 'unishard[quantization]'`.
    """

    shorthand: ClassVar[tuple[str, ...]] = ("type",)

    type: Annotated[
        Literal["none", "nf4", "fp4", "int8"],
        Spellings(),
        BeforeValidator(lower),
        OffAt("none"),
    ] = Field(default="none")
    """How a weight is stored: in 4 bits (`nf4`, `fp4`), with one fp32 scale for every 64 elements, or in 8 bits
    (`int8`, LLM.int8), with one for every row."""
    double_quantization: Annotated[bool, OffAt(False), _FOUR_BITS] = Field(default=False)
    """Whether the scales of 4-bit weights are quantized too, to 8 bits: 4.13 bits an element in place of 4.5.

    Every rank then reads all weights once, since the mean of all scales of a weight is subtracted from them.
    """
    skip_modules: Annotated[Literal["auto"] | list[Pattern], _QUANTIZED] = Field(default="auto")
    """Linear layers that are not quantized: regular expressions for parts of their names. `auto`: the head of the
    model, and what its class keeps in fp32 where it trains in fp16."""

    @property
    def on(self) -> bool:
        """Whether anything is quantized."""
        return self.type != "none"
