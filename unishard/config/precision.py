"""Dtypes of computation, master weights, gradients and reductions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from unishard.config.patterns import Pattern
from unishard.config.relevance import Not, OffAt, OnlyWith
from unishard.config.section import Section
from unishard.config.spellings import Spellings, lower

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
"""Other tools' names for training without fp32 master weights, which takes two fields here."""


def _dtype(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    name = value.lower()
    if name in _PURE:
        raise PydanticCustomError(
            "pure",
            "{word} keeps weights and optimizer state in {dtype} too; write compute: {dtype} and master: {dtype} below "
            "precision, or only {dtype} for fp32 master weights",
            {"word": name, "dtype": _PURE[name]},
        )
    return _ALIASES.get(name, name)


_MATMUL = {"highest": "fp32", "ieee": "fp32", "high": "tf32"}
"""torch's words for the same."""


def _matmul(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError(
            "not_a_word", "is not true or false; write tf32 or fp32, or keep for torch's own setting"
        )
    name = lower(value)
    return _MATMUL.get(name, name) if isinstance(name, str) else name


DType = Annotated[Literal["fp32", "bf16", "fp16"], BeforeValidator(_dtype), Spellings(tuple(_ALIASES))]

_MIXED = OnlyWith({"compute": Not("fp32")}, "everything is in fp32")
_FP16 = OnlyWith(
    {"compute": ("fp16",)},
    "only fp16 has a loss scale",
    "is unused with compute {self.compute}, which needs no loss scale; remove it or choose fp16",
)
_DYNAMIC_SCALE = OnlyWith(
    {"loss_scale": ("dynamic",)},
    "the loss scale is constant",
    "is unused with a constant loss_scale of {self.loss_scale:g}; remove it or write loss_scale: dynamic",
)


class Precision(Section):
    """Dtypes. By default the master weights, the optimizer state, and the gradient sums are fp32."""

    shorthand: ClassVar[tuple[str, ...]] = ("compute",)

    compute: DType = Field(default="fp32")
    """Dtype of parameters and activations in forward and backward. `bf16` and `fp16` also cast floating-point inputs,
    as `cast_inputs` says; under `fp32` no input is cast, so it must be fp32. `fp16` scales the loss."""
    master: DType = Field(default="fp32")
    """Dtype of the weights that the optimizer updates, and of its state. `fp32` keeps master weights beside a `bf16` or
    `fp16` copy, also for a model that was loaded in another dtype. The dtype of `compute` keeps no master weights: less
    memory, but small updates are lost."""
    reduce: DType = Field(default="fp32")
    """Dtype in which gradients are summed over the ranks. `bf16` or `fp16` halves the traffic and loses small
    gradients."""
    accumulate: DType = Field(default_factory=lambda validated: validated.get("master", "fp32"))
    """Dtype in which the gradients of an accumulation window (the micro-batches of one update) are summed. Default:
    that of `master`."""
    cast_inputs: Annotated[bool | Annotated[list[str], Field(min_length=1)], _MIXED] = Field(default=True)
    """Which floating-point inputs are cast to a 16-bit `compute`: `true` for all inputs of the model and the first
    argument of each unit, `false` for none, or the names of the arguments of both that are cast, as in the signatures
    of `forward`. bf16 rounds whole numbers above 256: name the other arguments to keep timesteps or positions as they
    are."""
    keep_fp32: Annotated[Literal["auto"] | list[Pattern], _MIXED] = Field(default="auto")
    """Parameters and buffers that stay in fp32 under a 16-bit `compute`: regular expressions, matched anywhere in their
    names. A module whose parameters are all kept computes in fp32; its floating-point inputs are cast to fp32, and its
    outputs back. `auto` keeps what a transformers model names in `_keep_in_fp32_modules_strict`, and in fp16 also in
    `_keep_in_fp32_modules`, whose forward casts itself. `[]` keeps nothing."""
    buffers: Annotated[Literal["keep", "fp32", "bf16", "fp16"], BeforeValidator(lower), Spellings(), OffAt("keep")] = (
        Field(default="keep")
    )
    """Dtype to which `prepare` casts floating-point buffers, such as rotary tables; `keep` does not cast them."""
    matmul: Annotated[Literal["keep", "fp32", "tf32"], BeforeValidator(_matmul), Spellings(tuple(_MATMUL))] = Field(
        default="keep"
    )
    """How matrix products of fp32 tensors are computed, in the whole process (`torch.set_float32_matmul_precision`).
    `tf32` rounds their factors to 10 bits, several times as fast on NVIDIA GPUs from Ampere on; `fp32` does not. `keep`
    leaves the setting as it is: torch's default is `fp32`. All models that one process prepares need the same value.
    Products in bf16 and fp16 do not change."""
    loss_scale: Annotated[Literal["dynamic"] | Annotated[float, Field(gt=0, allow_inf_nan=False)], _FP16] = Field(
        default="dynamic"
    )
    """Loss scale in fp16: the loss is multiplied by it before backward, and the gradients are divided by it afterwards.
    `dynamic` halves it when a gradient is not finite and doubles it after `loss_scale_growth_interval` updates in a
    row, as `torch.amp.GradScaler` does. A number is constant."""
    initial_loss_scale: Annotated[float, _FP16, _DYNAMIC_SCALE] = Field(default=65536.0, gt=0, allow_inf_nan=False)
    """Initial value of a dynamic loss scale."""
    loss_scale_growth_interval: Annotated[int, _FP16, _DYNAMIC_SCALE] = Field(default=2000, ge=1)
    """Consecutive updates without a skip after which a dynamic loss scale doubles."""

    @property
    def pure(self) -> bool:
        """Whether there are no fp32 master weights: the optimizer updates the weights that the model computes with."""
        return self.master == self.compute != "fp32"

    def _problems(self) -> Iterator[tuple[str, str]]:
        if self.master not in ("fp32", self.compute):
            yield (
                "master",
                f"{self.master} is neither fp32 nor the dtype of compute; write fp32, or {self.compute} for no master "
                "weights",
            )
        if self.reduce not in ("fp32", self.compute):
            yield (
                "reduce",
                f"{self.reduce} would round the {self.compute} gradients; write fp32, or set precision.compute to "
                f"{self.reduce}",
            )
        if self.pure and self.accumulate != self.master:
            yield (
                "accumulate",
                f"gradients have the dtype of the weights, {self.master}; remove it, or set precision.master to fp32",
            )
        elif self.accumulate not in ("fp32", self.compute):
            yield (
                "accumulate",
                f"{self.accumulate} would round the {self.compute} gradients; write fp32, or set precision.compute to "
                f"{self.accumulate}",
            )
