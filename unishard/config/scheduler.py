"""The learning rate schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from unishard.config.relevance import Not, OnlyWith
from unishard.config.section import Section
from unishard.config.spellings import Spellings, lower

_ENDING = ("linear", "cosine", "wsd")
_END = OnlyWith(
    {"name": _ENDING},
    "the schedule has no end",
    "is unused with {self._whose} schedule; remove it or choose linear, cosine or wsd",
)
_STABLE = OnlyWith(
    {"name": ("wsd",)},
    "the schedule has no stable phase",
    "is unused with {self._whose} schedule; remove it or choose wsd",
)
_WARMUP = OnlyWith(
    {"warmup_steps": Not(0)},
    "there is no warm-up",
    "is unused without a warm-up; remove it or set scheduler.warmup_steps",
)
_CHANGING_RATE = OnlyWith(
    {"name": Not("constant"), "warmup_steps": Not(0)},
    "the rate is constant",
    "is unused with a constant rate; remove it or set scheduler.warmup_steps",
)


class Scheduler(Section):
    """The learning rate schedule. It advances once per update that is not skipped, on any number of ranks."""

    shorthand: ClassVar[tuple[str, ...]] = ("name",)

    name: Annotated[
        Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"], BeforeValidator(lower), Spellings()
    ] = Field(default="constant")
    """Shape after the warm-up: constant, linear decay, cosine decay, the inverse square root of the updates over
    `warmup_steps` (10,000 without a warm-up), as in transformers, or `wsd` (warm-up, stable, decay): constant until the
    last `decay_steps` updates."""
    warmup_steps: int = Field(default=0, ge=0)
    """Updates over which the rate rises; update i uses i / warmup_steps of the range, as in transformers."""
    warmup_type: Annotated[Literal["linear", "log"], BeforeValidator(lower), Spellings(), _WARMUP] = Field(
        default="linear"
    )
    """How it rises: linearly, or logarithmically, fast at first (`log`: update i uses ln(i + 1) / ln(warmup_steps) of
    the range, as in DeepSpeed)."""
    warmup_start_ratio: Annotated[float, _WARMUP] = Field(default=0.0, ge=0, le=1)
    """Rate at the start of the warm-up, as a fraction of `optimizer.lr`."""
    delay_steps: Annotated[int, _CHANGING_RATE] = Field(default=0, ge=0)
    """Updates at the first rate before the schedule begins. DeepSpeed's `WarmupLR` and `WarmupDecayLR` wait for one."""
    total_steps: Annotated[int | None, _END] = Field(default=None, ge=1)
    """Updates until the end of the decay, including warm-up, excluding `delay_steps`; required by `linear`, `cosine`
    and `wsd`."""
    decay_steps: Annotated[int | None, _STABLE] = Field(default=None, ge=1)
    """Updates of the decay of `wsd`, the last of `total_steps`; required by it."""
    decay_type: Annotated[Literal["linear", "cosine", "sqrt"], BeforeValidator(lower), Spellings(), _STABLE] = Field(
        default="linear"
    )
    """How the rate of `wsd` falls: linearly, as half a cosine, or as one minus the square root of the progress."""
    min_lr_ratio: Annotated[float, _END] = Field(default=0.0, ge=0, le=1)
    """Rate at the end of the decay, as a fraction of `optimizer.lr`."""

    @property
    def ends(self) -> bool:
        """Whether the rate falls until `total_steps`; the other schedules have no end."""
        return self.name in _ENDING

    @property
    def _whose(self) -> str:
        return f"{'an' if self.name.startswith('i') else 'a'} {self.name}"

    def _problems(self) -> Iterator[tuple[str, str]]:
        if self.ends and self.total_steps is None:
            yield "total_steps", f"is required by {self._whose} schedule; write the number of updates"
        elif self.ends and self.total_steps is not None and self.warmup_steps >= self.total_steps:
            yield "warmup_steps", f"must be smaller than total_steps ({self.total_steps}), got {self.warmup_steps}"
        elif self.name == "wsd" and self.total_steps is not None:
            yield from self._problems_of_decay(self.total_steps - self.warmup_steps)
        if self.warmup_steps == 1 and self.warmup_type == "log":
            yield (
                "warmup_type",
                "log needs a warm-up of at least 2 updates; set scheduler.warmup_steps to 2 or write linear",
            )

    def _problems_of_decay(self, left: int) -> Iterator[tuple[str, str]]:
        if self.decay_steps is None:
            yield "decay_steps", "is required by a wsd schedule; write the number of updates"
        elif self.decay_steps > left:
            yield "decay_steps", f"must be at most {left}, total_steps less warmup_steps, got {self.decay_steps}"
