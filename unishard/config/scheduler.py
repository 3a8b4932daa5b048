"""The learning rate schedule."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from unishard.config.relevance import UnusedIf
from unishard.config.section import Section, refuse
from unishard.config.spellings import Spellings, lower

_ENDLESS = UnusedIf(lambda cfg: not cfg.scheduler.ends, "the schedule has no end")
_NO_WARMUP = UnusedIf(lambda cfg: not cfg.scheduler.warmup_steps, "there is no warm-up")
_CONSTANT_RATE = UnusedIf(
    lambda cfg: cfg.scheduler.name == "constant" and not cfg.scheduler.warmup_steps, "the rate is constant"
)


class Scheduler(Section):
    """The learning rate schedule. It advances once per update that is not skipped, on any number of ranks."""

    shorthand: ClassVar[tuple[str, ...]] = ("name",)

    name: Annotated[Literal["constant", "linear", "cosine", "inverse_sqrt"], BeforeValidator(lower), Spellings()] = (
        Field(default="constant")
    )
    """Shape after the warm-up: constant, linear decay, cosine decay, or the inverse square root of the updates over
    `warmup_steps` (10,000 without a warm-up), as in transformers."""
    warmup_steps: int = Field(default=0, ge=0)
    """Updates over which the rate rises; update i uses i / warmup_steps of the range, as in transformers."""
    warmup_type: Annotated[Literal["linear", "log"], BeforeValidator(lower), Spellings(), _NO_WARMUP] = Field(
        default="linear"
    )
    """How it rises: linearly, or logarithmically, fast at first (`log`: update i uses ln(i + 1) / ln(warmup_steps) of
    the range, as in DeepSpeed)."""
    warmup_start_ratio: Annotated[float, _NO_WARMUP] = Field(default=0.0, ge=0, le=1)
    """Rate at the start of the warm-up, as a fraction of `optimizer.lr`."""
    delay_steps: Annotated[int, _CONSTANT_RATE] = Field(default=0, ge=0)
    """Updates at the first rate before the schedule begins. DeepSpeed's `WarmupLR` and `WarmupDecayLR` wait for one."""
    total_steps: Annotated[int | None, _ENDLESS] = Field(default=None, ge=1)
    """Updates until the end of the decay, including warm-up, excluding `delay_steps`; required by `linear` and
    `cosine`."""
    min_lr_ratio: Annotated[float, _ENDLESS] = Field(default=0.0, ge=0, le=1)
    """Rate at the end of the decay, as a fraction of `optimizer.lr`."""

    @property
    def ends(self) -> bool:
        """Whether the rate falls until `total_steps`; the other schedules have no end."""
        return self.name in ("linear", "cosine")

    @property
    def _whose(self) -> str:
        return f"{'an' if self.name.startswith('i') else 'a'} {self.name}"

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems: list[tuple[str, str]] = []
        if not self.ends:
            problems += [
                (field, f"is unused with {self._whose} schedule; remove it or choose linear or cosine")
                for field in ("total_steps", "min_lr_ratio")
                if field in self.changed
            ]
        elif self.total_steps is None:
            problems.append(("total_steps", f"is required by {self._whose} schedule; write the number of updates"))
        elif self.warmup_steps >= self.total_steps:
            problems.append(
                ("warmup_steps", f"must be smaller than total_steps ({self.total_steps}), got {self.warmup_steps}")
            )
        if not self.warmup_steps:
            problems += [
                (field, "is unused without a warm-up; remove it or set scheduler.warmup_steps")
                for field in ("warmup_type", "warmup_start_ratio")
                if field in self.changed
            ]
        elif self.warmup_steps == 1 and self.warmup_type == "log":
            problems.append(
                (
                    "warmup_type",
                    "log needs a warm-up of at least 2 updates; set scheduler.warmup_steps to 2 or write linear",
                )
            )
        if self.name == "constant" and not self.warmup_steps and "delay_steps" in self.changed:
            problems.append(("delay_steps", "is unused with a constant rate; remove it or set scheduler.warmup_steps"))
        refuse(problems)
        return self
