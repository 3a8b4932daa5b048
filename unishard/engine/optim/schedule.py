"""The learning rate schedule of a config, a closed form of the number of updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from unishard.config import Scheduler
from unishard.contract.training_facts import ScheduleFacts
from unishard.engine.optim.saved_groups import SavedGroups

_SCALE = 10_000
"""Updates over which `inverse_sqrt` falls to the square root of a half, without a warm-up that says it."""
_LEFT: Mapping[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
"""What is left of a decay, by its shape."""


def factor(cfg: Scheduler, updates: int) -> float:
    """Factor of the learning rate after `updates` updates.

    The same closed forms as `get_linear_schedule_with_warmup`, `get_cosine_schedule_with_warmup` (both with
    `min_lr_ratio` as floor), `get_inverse_sqrt_schedule` and `get_wsd_schedule` of transformers 5.23; the logarithmic
    warm-up is that of `WarmupLR` and `WarmupDecayLR` in DeepSpeed 0.19.8.
    """
    updates = max(0, updates - cfg.delay_steps)
    if updates < cfg.warmup_steps:
        linear = cfg.warmup_type == "linear"
        climbed = updates / cfg.warmup_steps if linear else math.log(updates + 1) / math.log(cfg.warmup_steps)
        return cfg.warmup_start_ratio + (1.0 - cfg.warmup_start_ratio) * climbed
    if cfg.name == "inverse_sqrt":
        scale = cfg.warmup_steps or _SCALE
        return math.sqrt(scale / (updates - cfg.warmup_steps + scale))
    if cfg.total_steps is None:
        return 1.0
    falls = cfg.decay_steps or cfg.total_steps - cfg.warmup_steps
    progress = min(1.0, max(0, updates - cfg.total_steps + falls) / falls)
    left = _LEFT[cfg.decay_type if cfg.name == "wsd" else cfg.name](progress)
    return cfg.min_lr_ratio + (1.0 - cfg.min_lr_ratio) * left


class Schedule:
    """Writes learning rates into an optimizer's parameter groups after each update that was not skipped."""

    def __init__(self, cfg: Scheduler, param_groups: list[dict[str, Any]]) -> None:
        self._cfg = cfg
        self._groups = param_groups
        self._peaks = [float(group["lr"]) for group in param_groups]
        self._updates = 0
        self._constant = cfg.name == "constant" and cfg.warmup_steps == 0
        self._write()

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group for the next update."""
        return float(self._groups[0]["lr"])

    @property
    def writes(self) -> bool:
        """Whether updates change the learning rates."""
        return not self._constant

    @property
    def ended(self) -> bool:
        """Whether the coming update is past `total_steps`, with a learning rate that stays 0."""
        cfg = self._cfg
        return (
            cfg.total_steps is not None and not cfg.min_lr_ratio and self._updates - cfg.delay_steps >= cfg.total_steps
        )

    def advance(self) -> None:
        """Move on by one update."""
        self._updates += 1
        self._write()

    can_retreat = True
    """Whether `retreat` works, so that `advance` may be called before it is known whether an update was skipped."""

    def retreat(self) -> None:
        """Take the last `advance` back: the update was skipped."""
        self._updates -= 1
        self._write()

    def close(self) -> None:
        """Do nothing: the groups keep their rates."""

    def facts(self) -> dict[str, Any]:
        """State for a checkpoint: the number of updates, and each group's peak learning rate."""
        return {"updates": self._updates, "peaks": self._peaks}

    def require(self, facts: ScheduleFacts) -> None:
        """Do nothing: every schedule of a checkpoint can be resumed."""

    def resume(self, facts: ScheduleFacts, groups: SavedGroups | None) -> None:
        """Resume at the update of a checkpoint, on the schedule of the current config.

        Args:
            facts: The schedule in the checkpoint.
            groups: Of the checkpoint; None if they differ. Their learning rates are used if the schedule is constant
                and had the same peaks, because then only the user can have changed them.
        """
        self._updates = facts.updates
        if self._constant and groups and groups.of(facts.peaks) == self._peaks:
            for group, options in zip(self._groups, groups.options, strict=True):
                if options.get("lr") is not None:
                    group["lr"] = float(options["lr"])
        self._write()

    def _write(self) -> None:
        if self._constant:
            return  # keep a learning rate that the user has set
        now = factor(self._cfg, self._updates)
        for group, peak in zip(self._groups, self._peaks, strict=True):
            group["lr"] = peak * now
