"""What TrainingArguments say about the learning rate over time (transformers 5.23, optimization.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from unishard.config.describe import shown
from unishard.contract.entries import DocumentValues, Key, KeyEffect, Undecided, Unreadable, left_out
from unishard.contract.key_rows import integer, number
from unishard.contract.rules import Fit
from unishard.contract.templates import is_placeholder
from unishard.formats.hf.json_argument import mapping_in
from unishard.formats.names import names

UPDATES = "the number of updates, which Trainer counts from the dataset and num_train_epochs"

_SHAPES: Mapping[str, str] = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_restarts": "cosine",
    "cosine_with_min_lr": "cosine",
    "polynomial": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse_sqrt",
    "warmup_stable_decay": "wsd",
}
_ENDING = ("linear", "cosine", "wsd")
"""Shapes that fall until the end of the training."""
_INSTEAD = "build the scheduler in the training script, or write linear or cosine"
DECAYS: Mapping[str, str] = {"linear": "linear", "cosine": "cosine", "1-sqrt": "sqrt"}
"""Shapes of the decay of `warmup_stable_decay`."""
_STAGES = names("num_decay_steps num_stable_steps warmup_type decay_type min_lr_ratio num_cycles")
_IN_KWARGS = names("scheduler.min_lr_ratio scheduler.decay_steps scheduler.decay_type scheduler.warmup_start_ratio")


def shape_of(value: Any) -> str:
    """The name of a schedule of transformers as it stands in its enum."""
    return str(getattr(value, "value", value) or "linear").strip().lower()


def kwargs_of(document: DocumentValues) -> Mapping[str, Any]:
    """The extra arguments of the schedule; empty where there are none."""
    value = mapping_in(document.get("lr_scheduler_kwargs"))
    return value if isinstance(value, Mapping) else {}


def _type(value: Any, document: DocumentValues) -> KeyEffect:
    shape = shape_of(value)
    if shape in _SHAPES:
        return _shaped(shape, kwargs_of(document), document)
    if shape in ("reduce_lr_on_plateau", "cosine_warmup_with_min_lr", "greedy"):
        return KeyEffect(Fit.UNSUPPORTED, f"the schedule {shape} is not supported; {_INSTEAD}")
    raise Unreadable(f"must be a schedule of transformers, got {shown(value)}; write linear or cosine", value)


def _shaped(shape: str, kwargs: Mapping[str, Any], document: DocumentValues) -> KeyEffect:
    if shape == "cosine_with_restarts" and number()(kwargs.get("num_cycles", 1)) != 1:
        return KeyEffect(Fit.UNSUPPORTED, f"a cosine that restarts is not supported; {_INSTEAD}")
    if shape in ("cosine", "cosine_with_min_lr") and number()(kwargs.get("num_cycles", 0.5)) != 0.5:
        return KeyEffect(Fit.UNSUPPORTED, f"only a cosine that falls once, over half a wave, is supported; {_INSTEAD}")
    if shape == "warmup_stable_decay":
        return _stages(kwargs, document)
    if shape == "polynomial" and number()(kwargs.get("power", 1.0)) != 1:
        return KeyEffect(Fit.UNSUPPORTED, f"of polynomials only the straight line of power 1 is supported; {_INSTEAD}")
    fields: dict[str, Any] = {"scheduler.name": _SHAPES[shape]}
    if _SHAPES[shape] in _ENDING:
        if _climbs(document):
            return KeyEffect(
                Fit.EXACT, _CLIMBS, {"scheduler.name": "constant", "scheduler.warmup_steps": warmup(document)}
            )
        fields["scheduler.total_steps"] = updates(document)
        try:
            fields["scheduler.min_lr_ratio"] = _floor(shape, kwargs, document)
        except Unreadable:
            if not is_placeholder(rate := document.get("learning_rate")):
                raise
            who = f"the placeholder {rate}"
            return KeyEffect(
                Fit.NEEDS_INPUT, f"the value comes from {who}", fields | {"scheduler.min_lr_ratio": Undecided(who)}
            )
    else:
        fields["scheduler.warmup_steps"] = 0 if shape == "constant" else warmup(document)
        if shape == "inverse_sqrt" and kwargs.get("timescale") not in (
            None,
            fields["scheduler.warmup_steps"] or 10_000,
        ):
            return KeyEffect(
                Fit.UNSUPPORTED,
                "only a timescale of warmup_steps is supported (10000 without a warmup); remove timescale",
            )
    return KeyEffect(fields=fields)


def _stages(kwargs: Mapping[str, Any], document: DocumentValues) -> KeyEffect:
    """Warm-up from the lowest rate, stable, decay to the lowest rate: `get_wsd_schedule`."""
    kind, warm, end = kwargs.get("decay_type", "cosine"), warmup(document), updates(document)
    if kwargs.get("num_decay_steps") is None:
        raise Unreadable("must have num_decay_steps among lr_scheduler_kwargs; write {num_decay_steps: 100}")
    if kind not in (*DECAYS,):
        raise Unreadable(f"must have a decay_type of {', '.join(DECAYS)}, got {shown(kind)}; write one of them")
    if warm and kwargs.get("warmup_type", "linear") != "linear":
        return KeyEffect(Fit.UNSUPPORTED, f"only a linear warm-up is supported; {_INSTEAD}")
    if kind == "cosine" and number()(kwargs.get("num_cycles", 0.5)) != 0.5:
        return KeyEffect(Fit.UNSUPPORTED, f"only a cosine that falls once, over half a wave, is supported; {_INSTEAD}")
    falls, low = integer(1)(kwargs["num_decay_steps"]), float(number(0, 1)(kwargs.get("min_lr_ratio", 0)))
    start = {"scheduler.warmup_start_ratio": low} if warm and low else {}
    if _climbs(document):
        return KeyEffect(Fit.EXACT, _CLIMBS, {"scheduler.name": "constant", "scheduler.warmup_steps": warm, **start})
    stable, known = kwargs.get("num_stable_steps"), isinstance(warm, int) and isinstance(end, int)
    if stable is not None and not (known and warm + integer(0)(stable) + falls == end):
        return KeyEffect(Fit.UNSUPPORTED, _OTHER_LENGTH)
    fields = {
        "scheduler.name": "wsd",
        "scheduler.total_steps": end,
        "scheduler.decay_steps": falls,
        "scheduler.decay_type": DECAYS[kind],
        "scheduler.min_lr_ratio": low,
    }
    return KeyEffect(fields={**fields, **start})


_OTHER_LENGTH = (
    "num_stable_steps is supported only where warm-up, stable and decay steps add up to max_steps; remove "
    "num_stable_steps"
)


def _floor(shape: str, kwargs: Mapping[str, Any], document: DocumentValues) -> float:
    """Where the fall ends, as a part of the learning rate."""
    if shape == "polynomial":
        return _part(number(0)(kwargs.get("lr_end", 1e-7)), _rate(document))
    if shape == "cosine_with_min_lr" and kwargs.get("min_lr_rate") is not None:
        return float(number(0, 1)(kwargs["min_lr_rate"]))
    if shape == "cosine_with_min_lr" and kwargs.get("min_lr") is not None:
        return _part(number(0)(kwargs["min_lr"]), _rate(document))
    return 0.0


def _rate(document: DocumentValues) -> float:
    return float(number(0)(document.get("learning_rate") or 5e-5))


def _part(end: float, rate: float) -> float:
    if not rate or end > rate:
        raise Unreadable(f"must end below the learning rate of {rate:g}, got {end:g}; write a smaller end")
    return float(f"{end / rate:.12g}")


def updates(document: DocumentValues) -> int | Undecided:
    """Updates until the end of the training; undecided where the dataset decides them."""
    steps = document.get("max_steps")
    if is_placeholder(steps):
        return Undecided(f"the placeholder {steps}")
    total = -1 if steps is None else int(integer()(steps))
    return total if total > 0 else Undecided(UPDATES)


def warmup(document: DocumentValues) -> int | Undecided:
    """Updates of the warm-up."""
    ratio = document.get("warmup_ratio")
    unknown = next((word for word in (document.get("warmup_steps"), ratio) if is_placeholder(word)), None)
    if unknown is not None:
        return Undecided(f"the placeholder {unknown}")
    steps = number(0)(document.get("warmup_steps") or 0)
    if not steps and ratio is not None:
        steps = number(0, 1)(ratio)
    if steps >= 1 or not steps:
        return int(steps)
    total = updates(document)
    if isinstance(total, Undecided):
        return Undecided(f"{steps:g} times {UPDATES}")
    return math.ceil(total * float(steps))


_CLIMBS = "the warm-up lasts as long as the training, so that the rate never falls"


def _climbs(document: DocumentValues) -> bool:
    """Whether a trial run ends before the rate falls."""
    first, last = warmup(document), updates(document)
    return isinstance(first, int) and isinstance(last, int) and first >= last


def _ends(document: DocumentValues) -> bool:
    """Whether the rate falls until the end of the training, in a way that is supported."""
    kind = document.get("lr_scheduler_type")
    try:
        return _SHAPES.get(shape_of(kind)) in _ENDING and _type(kind, document).fit is not Fit.UNSUPPORTED
    except Unreadable:
        return False


def _warmup(value: Any, document: DocumentValues) -> KeyEffect:
    number(0)(value or 0)
    if shape_of(document.get("lr_scheduler_type")) not in _SHAPES:
        return left_out("belongs to the schedule, which the training script builds")
    if shape_of(document.get("lr_scheduler_type")) == "constant":
        note = "is off" if not value else "the constant schedule ignores warmup; write constant_with_warmup"
        return left_out(note)
    steps = warmup(document)
    if isinstance(steps, Undecided):
        return KeyEffect(Fit.NEEDS_INPUT, f"the value is {steps.who}", {"scheduler.warmup_steps": steps})
    return KeyEffect(fields={"scheduler.warmup_steps": steps})


def _ratio(value: Any, document: DocumentValues) -> KeyEffect:
    if not number(0, 1)(value or 0):
        return left_out("is off")
    if document.get("warmup_steps"):
        return left_out("warmup_steps takes precedence")
    effect = _warmup(value, document)
    if effect.fit is not Fit.EXACT:
        return effect
    return KeyEffect(
        effect.fit, "transformers 5 has no warmup_ratio any more; warmup_steps below 1 is one", effect.fields
    )


def _max_steps(value: Any, document: DocumentValues) -> KeyEffect:
    if integer()(value) <= 0:
        return left_out("is off: num_train_epochs counts")
    if not _ends(document):
        return length(f"ends after {shown(value)} updates")
    if _climbs(document):
        return left_out(_CLIMBS)
    return KeyEffect(fields={"scheduler.total_steps": integer(1)(value)})


def _epochs(value: Any, document: DocumentValues) -> KeyEffect:
    number(0)(value)
    if not isinstance(updates(document), Undecided):
        return left_out("max_steps takes precedence")
    return length(f"goes {shown(value)} times over the data")


def length(action: str) -> KeyEffect:
    """The effect of a key that says only how long the training is."""
    return KeyEffect(Fit.NEEDS_INPUT, f"the training {action}; do that in your loop", copy_verbatim=True, notable=True)


def _kwargs(value: Any, document: DocumentValues) -> KeyEffect:
    value = mapping_in(value)
    if value in (None, {}, ""):
        return left_out("is empty")
    if not isinstance(value, Mapping):
        raise Unreadable(f"must be a mapping, got {shown(value)}; write {{min_lr_rate: 0.1}}", value)
    known = {
        "cosine_with_min_lr": ("min_lr_rate", "min_lr", "num_cycles"),
        "polynomial": ("lr_end", "power"),
        "cosine": ("num_cycles",),
        "cosine_with_restarts": ("num_cycles",),
        "inverse_sqrt": ("timescale",),
        "warmup_stable_decay": _STAGES,
    }.get(shape_of(document.get("lr_scheduler_type")), ())
    strange = [key for key in value if key not in known]
    if strange:
        shape = shape_of(document.get("lr_scheduler_type"))
        return KeyEffect(Fit.UNSUPPORTED, f"the {shape} schedule takes no {', '.join(map(str, strange))}; remove it")
    effect = _type(document.get("lr_scheduler_type"), document)
    fields = {field: value for field, value in effect.fields.items() if field in _IN_KWARGS}
    if "num_stable_steps" in value and fields:
        fields |= {"scheduler.total_steps": updates(document), "scheduler.warmup_steps": warmup(document)}
    return KeyEffect(fields=fields) if fields else left_out("says what the schedule does anyway")


SCHEDULE: Mapping[str, Key] = {
    "lr_scheduler_type": Key(
        _type, ("scheduler.name", "scheduler.total_steps", "scheduler.min_lr_ratio"), tool_default="linear"
    ),
    "lr_scheduler_kwargs": Key(
        _kwargs,
        ("scheduler.min_lr_ratio",),
        note="of warmup_stable_decay also `decay_steps`, `decay_type` and `warmup_start_ratio`",
    ),
    "warmup_steps": Key(_warmup, ("scheduler.warmup_steps",), tool_default=0),
    "warmup_ratio": Key(
        _ratio,
        ("scheduler.warmup_steps",),
        note="transformers 5 has no warmup_ratio any more; warmup_steps below 1 is one",
    ),
    "max_steps": Key(_max_steps, ("scheduler.total_steps",)),
    "num_train_epochs": Key(_epochs, (), Fit.NEEDS_INPUT, "your loop goes that often over the data"),
}
