"""Rows for what the training script around Accelerate does itself, where it is more than the fallbacks say.

The same for every engine.
"""

from __future__ import annotations

from collections.abc import Mapping

from unishard.config import Config
from unishard.contract.field_rows import (
    FALLBACKS,
    left_to_script,
    noted,
    row,
    saved_by_script,
    when_default,
)
from unishard.contract.rules import NO_KEY, Fit, Rule, When, unless
from unishard.formats.accelerate.launch_rules import LAUNCH_RULES

__all__ = ["BY_SCRIPT"]


def _every_step(cfg: Config) -> bool:
    return cfg.training.gradient_accumulation_steps == 1


_SCHEDULE = "steps once for each rank: pass step_scheduler_with_optimizer=False"

BY_SCRIPT: Mapping[str, Rule] = {
    "training.last_window": row(
        Fit.APPROXIMATE,
        NO_KEY,
        "Accelerate divides the last update by the full window: the last samples weigh less",
        unless("no accumulation", _every_step, "every window is full"),
        When(
            "drop",
            lambda cfg: cfg.training.last_window == "drop",
            Fit.NEEDS_INPUT,
            "leave out the batches that do not fill a window",
        ),
    ),
    "training.seed": left_to_script(
        "call accelerate.utils.set_seed(..., device_specific=True), and seed the DataLoader"
    ),
    **noted({path: _SCHEDULE for path in FALLBACKS if path.startswith("scheduler.")}),
    **noted(
        {
            "training.micro_batch_size": "batch_size of the DataLoader passed to Accelerator.prepare, for each rank",
            "optimizer.name": "build the optimizer and pass it to Accelerator.prepare",
        }
    ),
    **{path: FALLBACKS[path]._replace(when=(when_default(path),)) for path in ("communication.overlap", "strict")},
    **saved_by_script("accelerator.save_state(...)"),
    **LAUNCH_RULES,
}
"""Rows by field."""
