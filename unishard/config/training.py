"""The training loop: batch sizes, accumulation, clipping, seed."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from unishard.config.section import Section

__all__ = ["Training"]


class Training(Section):
    """The training loop: batch sizes, accumulation, clipping, seed."""

    micro_batch_size: int = Field(default=1, ge=1)
    """Samples that one rank puts through the model at once."""
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    """Micro-batches of each rank whose gradients are averaged into one update."""
    global_batch_size: int | None = Field(default=None, ge=1)
    """Samples in one update over all ranks. Only checked: it must equal micro_batch_size x gradient_accumulation_steps x
    ranks. Leave it out and it is computed."""
    gradient_clipping: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Largest global L2 norm of the gradients; larger ones are scaled down to it. `null` for no clipping."""
    nonfinite: Literal["skip", "raise", "ignore"] = Field(default="skip")
    """What happens to an update whose gradients hold an infinity or a NaN on any rank: `skip` leaves it out and `raise` also
    raises `NonFiniteError`, both without touching parameters, optimizer state or schedule; `ignore` makes it, as plain torch does."""
    last_window: Literal["step", "drop"] = Field(default="step")
    """What happens to the micro-batches at the end of the data that do not fill an accumulation window: `step` averages over
    those that are there, `drop` skips them."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the data order, and (with the rank added) of torch's random numbers on each rank after `prepare`."""
