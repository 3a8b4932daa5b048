"""The lengths of `warmup_stable_decay`, of which LLaMA-Factory assumes those that are not said (0.9,
train/trainer_utils.py).
"""

from __future__ import annotations

from typing import Any

from unishard.contract.entries import DocumentValues, Key, KeyEffect
from unishard.contract.render import FieldResult, RenderedDocument
from unishard.contract.rules import Fit
from unishard.formats.hf.scheduling import kwargs_of, shape_of
from unishard.formats.reading.document import ReadDocument

_KWARGS = "lr_scheduler_kwargs"
SAID_WHOLE = ("lr_scheduler_type", _KWARGS)
"""Arguments that are not read where LLaMA-Factory completes the second."""
_LENGTHS = {"num_stable_steps", "num_decay_steps"}
_BOTH = "LLaMA-Factory divides the updates after the warm-up by itself; write num_stable_steps and num_decay_steps"
_SUM = ("scheduler.total_steps", "scheduler.warmup_steps")


def in_stages(row: Key) -> Key:
    """A row of the schedule that wants both lengths of this one."""

    def read(value: Any, document: DocumentValues) -> KeyEffect:
        stages = shape_of(document.get("lr_scheduler_type")) == "warmup_stable_decay"
        if stages and not kwargs_of(document).keys() >= _LENGTHS:
            return KeyEffect(Fit.UNSUPPORTED, _BOTH)
        return row.read(value, document)

    return row._replace(read=read)


def with_stages(rendered: RenderedDocument, reading: ReadDocument) -> RenderedDocument:
    """The document with the length of the stable phase, where the lengths beside it are known."""
    scheduler, kwargs = reading.config.scheduler, rendered.document.get(_KWARGS)
    if scheduler.name != "wsd" or not kwargs or "num_stable_steps" in kwargs:
        return rendered
    if not reading.undecided.keys().isdisjoint(_SUM):
        asked = FieldResult(Fit.NEEDS_INPUT, _KWARGS, "LLaMA-Factory assumes num_stable_steps; write it there")
        return rendered._replace(fields={**rendered.fields, "scheduler.decay_steps": asked})
    stable = (scheduler.total_steps or 0) - scheduler.warmup_steps - (scheduler.decay_steps or 0)
    return rendered._replace(document={**rendered.document, _KWARGS: {**kwargs, "num_stable_steps": stable}})
