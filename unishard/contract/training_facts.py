"""What a checkpoint says of the optimizer, the schedule and the loss scale, whichever engine or tool wrote it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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


class PassFacts(Facts):
    """The training data, where the loader's position does not tell the epoch."""

    loader: str
    """Class of the loader."""
    epoch: int | None = Field(default=None, ge=0, lt=LARGEST)
    """Passes over it that are complete, counted by the engine; None if unknown."""
    batches: int = Field(default=0, ge=0, lt=LARGEST)
    """Batches that a rank has read since."""


def plain(value: Any) -> bool:
    """Whether a value can be stored in a manifest: a number, a string, a boolean, None, or a list of them."""
    return (
        value is None
        or isinstance(value, (bool, int, float, str))
        or (isinstance(value, (list, tuple)) and all(map(plain, value)))
    )


def optimizer_of(groups: Iterable[tuple[Iterable[str], Mapping[str, Any]]], keys: Iterable[str]) -> OptimizerFacts:
    """The facts of an optimizer whose class is not recorded: the class is inferred from its state.

    Args:
        groups: Names of the parameters and options of each group.
        keys: Of the optimizer's state, such as `exp_avg`.
    """
    facts = [
        GroupRecord(
            names=list(names),
            options={key: value for key, value in options.items() if key != "params" and plain(value)},
        )
        for names, options in groups
    ]
    decoupled = facts[0].options.get("decoupled_weight_decay", True) if facts else True
    classes = {
        "exp_avg_sq": "AdamW" if decoupled else "Adam",
        "momentum_buffer": "SGD",
        "sum": "Adagrad",
        "exp_avg": "Lion",
    }
    held = set(keys)
    return OptimizerFacts(
        class_name=next((name for key, name in classes.items() if key in held), "unknown"), groups=facts
    )
