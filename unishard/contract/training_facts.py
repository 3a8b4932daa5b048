"""What a checkpoint says of the optimizer, the schedule and the loss scale, whichever engine or tool wrote it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

LARGEST = 2**62
"""No count of anything is as large."""


class Facts(BaseModel):
    """A part of a manifest."""

    # Non-finite values, such as the norms of a diverged run, are written as NaN and Infinity, which Python's json reads
    # too.
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, ser_json_inf_nan="constants")


class GroupRecord(Facts):
    """One parameter group of the optimizer."""

    names: list[str]
    """Names of its parameters."""
    options: dict[str, Any]
    """Its options, such as `lr` and `weight_decay`."""


class OptimizerFacts(Facts):
    """The optimizer."""

    class_name: str
    """Class of the optimizer."""
    groups: list[GroupRecord]
    """Its parameter groups, in order."""


class SchedulerRecord(Facts):
    """A scheduler object of torch or transformers."""

    class_name: str
    """Class of the scheduler."""
    state: Any
    """What its `state_dict` returned, encoded as in `state` of the manifest, without tensors."""


class ScheduleFacts(Facts):
    """The learning rate schedule."""

    updates: int = Field(ge=0, lt=LARGEST)
    """Optimizer steps taken; skipped ones are not counted."""
    peaks: list[float] = []
    """Peak learning rate of each parameter group, which the config's schedule multiplies."""
    torch: SchedulerRecord | None = None
    """State of the scheduler object, if there was one."""


class LossScaleFacts(Facts):
    """The loss scale of fp16."""

    value: float = Field(gt=0, allow_inf_nan=False)
    """The factor of the loss."""
    made: int = Field(ge=0, lt=LARGEST)
    """Optimizer steps since it last changed."""
