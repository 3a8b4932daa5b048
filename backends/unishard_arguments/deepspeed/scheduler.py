"""The learning rate over time: what DeepSpeed's section says, and how it says the fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from unishard.config import Config
from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.contract.entries import DocumentValues, Key, KeyEffect, Undecided, Unreadable
from unishard.contract.field_rows import asked, exact, row
from unishard.contract.key_rows import drops, integer, number
from unishard.contract.render import AUTO
from unishard.contract.rules import SCRIPT, Fit, Rule, approximate, is_, needs_input, unless
from unishard_arguments.deepspeed.facts import ARGUMENTS, dropped, quiet, undecided
from unishard_arguments.deepspeed.optimizer import peak_of
from unishard_deepspeed import fields

_P = "scheduler.params."
_SHAPES = {
    "WarmupLR": "constant",
    "WarmupDecayLR": "linear",
    "WarmupCosineLR": "cosine",
    "LinearLR": "linear",
    "CosineAnnealingLR": "cosine",
}
_WARM = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_NEEDS = {
    "WarmupDecayLR": "total_num_steps",
    "WarmupCosineLR": "total_num_steps",
    "LinearLR": "total_iters",
    "CosineAnnealingLR": "T_max",
}
_SCRIPT = "use linear or cosine, or build the scheduler in the training script"
_BEHIND = "DeepSpeed starts at 0 and warms up one update late; the cosine is the same"


def _kind(document: DocumentValues) -> str:
    return str(document.get("scheduler.type") or "")


def assumed(document: DocumentValues) -> dict[str, Any]:
    """Defaults of DeepSpeed's schedules (DeepSpeed 0.19.8, runtime/lr_schedules.py)."""
    kind = _kind(document)
    defaults: dict[str, Any] = {}
    if kind in _WARM:
        defaults |= {"warmup_num_steps": 1000, "warmup_type": "log"}
    if kind == "WarmupDecayLR" and not any(f"{_P}{name}" in document for name in ("warmup_max_lr",)):
        defaults |= {"warmup_max_lr": 0.001}
    if kind == "WarmupCosineLR":
        defaults |= {"cos_min_ratio": 0.0001}
    if kind == "LinearLR":  # torch 2.13
        defaults |= {"start_factor": 1 / 3, "end_factor": 1.0, "total_iters": 5}
    return {f"{_P}{name}": value for name, value in defaults.items()}


def _type(value: Any, document: DocumentValues) -> KeyEffect:
    if value in _ONLY:
        note = (
            f"{value} is not supported; build the scheduler in the training script, or set constant, linear or cosine"
        )
        return KeyEffect(
            Fit.NEEDS_INPUT,
            note,
            {"scheduler.name": Undecided(f"your training script, which builds {value}")},
            copy_verbatim=True,
        )
    if not isinstance(value, str) or value not in _SHAPES:
        near = {name.lower(): name for name in _SHAPES}.get(str(value).lower())
        hint = f"did you mean {near!r}?" if near else _SCRIPT
        raise Unreadable(f"must be {', '.join(_SHAPES)}, got {value!r}; {hint}", value)
    total = _NEEDS.get(value)
    if total and document.get(f"{_P}{total}") != AUTO and quiet(integer(1), document.get(f"{_P}{total}")) is None:
        raise Unreadable(
            f"must have {total} among its params, the number of updates, got {value} without; write it", value
        )
    values: dict[str, Any] = {"scheduler.name": _SHAPES[value]}
    if value == "WarmupCosineLR":
        return KeyEffect(Fit.APPROXIMATE, _BEHIND, values)
    if value in _WARM:
        return KeyEffect(
            note="DeepSpeed's first two updates both use its first rate", fields=values | {"scheduler.delay_steps": 1}
        )
    return KeyEffect(fields=values)


def _of(kinds: tuple[str, ...], read: Callable[[Any, DocumentValues], KeyEffect], *fields: str) -> Key:
    def checked(value: Any, document: DocumentValues) -> KeyEffect:
        kind = _kind(document)
        return read(value, document) if kind in kinds else dropped(f"{kind or 'no scheduler'} does not have it")

    return Key(checked, fields)


def _steps(field: str, who: str, low: int) -> Callable[[Any, DocumentValues], KeyEffect]:
    def read(value: Any, document: DocumentValues) -> KeyEffect:
        if value == AUTO:
            return undecided(f"{who} {ARGUMENTS}", field)
        steps = integer(0 if low > 1 else 1)(value)
        note = f"DeepSpeed takes at least {low}" if steps < low else ""
        return KeyEffect(note=note, fields={field: max(low, steps)})

    return read


def _top(value: Any, document: DocumentValues) -> KeyEffect:
    peak = peak_of(document)
    if value == AUTO and not isinstance(peak, Undecided):
        return dropped("transformers fills in learning_rate, which the optimizer's lr says")
    if isinstance(peak, Undecided):
        return undecided(peak.who, "optimizer.lr")
    return KeyEffect(note="DeepSpeed writes it over the optimizer's lr", fields={"optimizer.lr": number(0)(value)})


def _bottom(value: Any, document: DocumentValues) -> KeyEffect:
    """The rate at which warm-up begins, and at which WarmupDecayLR ends."""
    rate = 0.0 if value == AUTO else number(0)(value)
    peak = peak_of(document)
    ends = ["scheduler.warmup_start_ratio"] + ["scheduler.min_lr_ratio"] * (_kind(document) == "WarmupDecayLR")
    if rate and not isinstance(peak, float | int):
        return undecided(f"{rate:g} / optimizer.lr, which the training script decides", *ends)
    note = "transformers fills in 0" if value == AUTO else ""
    return KeyEffect(note=note, fields=dict.fromkeys(ends, rate / peak if rate and peak else 0.0))


def _ratio(field: str) -> Callable[[Any, DocumentValues], KeyEffect]:
    return lambda value, document: KeyEffect(fields={field: number(0, 1)(value)})


def _climb(value: Any, document: DocumentValues) -> KeyEffect:
    if value not in ("log", "linear"):
        return KeyEffect(
            note=f"DeepSpeed does not know {value!r} and takes log", fields={"scheduler.warmup_type": "log"}
        )
    return KeyEffect(fields={"scheduler.warmup_type": value})


def _floor(value: Any, document: DocumentValues) -> KeyEffect:
    peak, rate = peak_of(document), number(0)(value)
    if rate and not isinstance(peak, float | int):
        return undecided(f"{rate:g} / optimizer.lr, which the training script decides", "scheduler.min_lr_ratio")
    return KeyEffect(fields={"scheduler.min_lr_ratio": rate / peak if rate and peak else 0.0})


def _start(value: Any, document: DocumentValues) -> KeyEffect:
    if number(0)(value) != 1:
        raise Unreadable(f"must be 1, got {value!r}; {_SCRIPT}", value)
    return KeyEffect(note="begins at optimizer.lr")


_TOTAL = _steps("scheduler.total_steps", "the number of updates, max_steps or num_train_epochs", 1)
_ONLY = {
    "OneCycle": (
        "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size cycle_first_stair_count "
        "cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom cycle_max_mom decay_mom_rate"
    ),
    "LRRangeTest": "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase",
}
"""Parameters of the schedules that unishard does not build (DeepSpeed 0.19.8, runtime/lr_schedules.py)."""

KEYS: Mapping[str, Key] = {
    "scheduler.type": Key(_type, ("scheduler.name", "scheduler.delay_steps")),
    f"{_P}warmup_num_steps": _of(_WARM, _steps("scheduler.warmup_steps", "warmup_steps", 2), "scheduler.warmup_steps"),
    f"{_P}warmup_type": _of(_WARM, _climb, "scheduler.warmup_type"),
    f"{_P}warmup_max_lr": _of(_WARM[:2], _top, "optimizer.lr"),
    f"{_P}warmup_min_lr": _of(_WARM[:2], _bottom, "scheduler.warmup_start_ratio", "scheduler.min_lr_ratio"),
    f"{_P}warmup_min_ratio": _of(_WARM[2:], _ratio("scheduler.warmup_start_ratio"), "scheduler.warmup_start_ratio"),
    f"{_P}cos_min_ratio": _of(_WARM[2:], _ratio("scheduler.min_lr_ratio"), "scheduler.min_lr_ratio"),
    f"{_P}total_num_steps": _of(_WARM[1:], _TOTAL, "scheduler.total_steps"),
    f"{_P}start_factor": _of(("LinearLR",), _start),
    f"{_P}end_factor": _of(("LinearLR",), _ratio("scheduler.min_lr_ratio"), "scheduler.min_lr_ratio"),
    f"{_P}total_iters": _of(("LinearLR",), _TOTAL, "scheduler.total_steps"),
    f"{_P}T_max": _of(("CosineAnnealingLR",), _TOTAL, "scheduler.total_steps"),
    f"{_P}eta_min": _of(("CosineAnnealingLR",), _floor, "scheduler.min_lr_ratio"),
    f"{_P}last_batch_iteration": drops("where a schedule goes on; checkpoints say so"),
    **{f"{_P}{name}": drops(f"belongs to {kind}") for kind, text in _ONLY.items() for name in text.split()},
}


def _takes_torchs(cfg: Config) -> bool:
    """DeepSpeed hands ZeRO's own optimizer to torch's schedules, which refuse it ("is not an Optimizer", DeepSpeed
    0.19.8).
    """
    return fields.stage_of_strategy(cfg) == 0 and cfg.precision.compute == "fp32"


def _type_of(cfg: Config) -> str | None:
    """The class that says the schedule; None for a constant rate, and where only a script can build it."""
    name, warms = cfg.scheduler.name, bool(cfg.scheduler.warmup_steps)
    if not warms and not _takes_torchs(cfg):
        return None
    return {
        ("constant", True): "WarmupLR",
        ("linear", True): "WarmupDecayLR",
        ("cosine", True): "WarmupCosineLR",
        ("linear", False): "LinearLR",
        ("cosine", False): "CosineAnnealingLR",
    }.get((name, warms))


def _params(cfg: Config, **by_type: tuple[str, Any]) -> Native:
    """The parameter that the schedule's class has for a field."""
    parameter = by_type.get(_type_of(cfg) or "")
    return {"scheduler": {"params": {parameter[0]: parameter[1]}}} if parameter else {}


def _name_of(cfg: Config, topology: Topology) -> Native:
    kind = _type_of(cfg)
    if kind is None:
        return {}
    return {"scheduler": {"type": kind, "params": {"start_factor": 1.0} if kind == "LinearLR" else {}}}


def _least(cfg: Config) -> int:
    """DeepSpeed's warm-ups last at least two updates."""
    return max(2, cfg.scheduler.warmup_steps)


def _warmup_of(cfg: Config, topology: Topology) -> Native:
    steps = ("warmup_num_steps", _least(cfg))
    return _params(cfg, WarmupLR=steps, WarmupDecayLR=steps, WarmupCosineLR=steps)


def _climb_of(cfg: Config, topology: Topology) -> Native:
    parameter = ("warmup_type", cfg.scheduler.warmup_type)
    return _params(cfg, WarmupLR=parameter, WarmupDecayLR=parameter, WarmupCosineLR=parameter)


def _start_of(cfg: Config, topology: Topology) -> Native:
    ratio = cfg.scheduler.warmup_start_ratio
    return _params(
        cfg, WarmupLR=("warmup_min_lr", ratio * cfg.optimizer.lr), WarmupCosineLR=("warmup_min_ratio", ratio)
    )


def _total_of(cfg: Config, topology: Topology) -> Native:
    total = cfg.scheduler.total_steps
    warm = ("total_num_steps", total and max(total, _least(cfg) + 1))
    return _params(
        cfg,
        WarmupDecayLR=warm,
        WarmupCosineLR=warm,
        LinearLR=("total_iters", total),
        CosineAnnealingLR=("T_max", total),
    )


def _floor_of(cfg: Config, topology: Topology) -> Native:
    ratio = cfg.scheduler.min_lr_ratio
    return _params(
        cfg,
        WarmupDecayLR=("warmup_min_lr", ratio * cfg.optimizer.lr),
        WarmupCosineLR=("cos_min_ratio", ratio),
        LinearLR=("end_factor", ratio),
        CosineAnnealingLR=("eta_min", ratio * cfg.optimizer.lr),
    )


_AHEAD = approximate("cosine with a warm-up", lambda cfg: _type_of(cfg) == "WarmupCosineLR", _BEHIND)
_BUILT = needs_input(
    "linear or cosine without a warm-up, but with no_shard in fp32",
    lambda cfg: cfg.scheduler.ends and _type_of(cfg) is None,
    "pass LinearLR or CosineAnnealingLR: deepspeed.initialize(lr_scheduler=lambda o: ...)",
)
_TOO_SHORT = approximate(
    "2 with a warm-up of 1",
    lambda cfg: (cfg.scheduler.warmup_steps, cfg.scheduler.total_steps) == (1, 2),
    "DeepSpeed's warm-up lasts at least two updates, so one more is written",
)
_TWO_ENDS = approximate(
    "linear with warm-up, and warmup_start_ratio is not min_lr_ratio",
    lambda cfg: _type_of(cfg) == "WarmupDecayLR" and cfg.scheduler.warmup_start_ratio != cfg.scheduler.min_lr_ratio,
    "WarmupDecayLR begins and ends at one rate; that of the end is written",
)

_NO_CLASS = needs_input(
    *is_("scheduler.name", "inverse_sqrt"),
    "DeepSpeed has none: deepspeed.initialize(lr_scheduler=lambda o: transformers.get_inverse_sqrt_schedule(o, "
    "num_warmup_steps))",
)
_WSD = (
    "DeepSpeed has none: deepspeed.initialize(lr_scheduler=lambda o: transformers.get_wsd_schedule(o, "
    "num_warmup_steps, num_decay_steps, num_training_steps))"
)
_NO_STAGES = needs_input(*is_("scheduler.name", "wsd"), _WSD)

RULES: Mapping[str, Rule] = {
    "scheduler.name": exact("scheduler.type", _NO_CLASS, _NO_STAGES, _BUILT, _AHEAD, to=_name_of),
    "scheduler.warmup_steps": Rule(
        Fit.EXACT,
        f"{_P}warmup_num_steps",
        to=_warmup_of,
        when=(
            _NO_CLASS,
            _NO_STAGES,
            approximate(
                "1", lambda cfg: cfg.scheduler.warmup_steps == 1, "DeepSpeed's warm-ups last at least two updates"
            ),
        ),
        auto=True,
    ),
    "scheduler.warmup_type": exact(f"{_P}warmup_type", _NO_CLASS, _NO_STAGES, to=_climb_of),
    "scheduler.warmup_start_ratio": exact(
        f"{_P}warmup_min_lr, {_P}warmup_min_ratio", _NO_CLASS, _NO_STAGES, _TWO_ENDS, to=_start_of
    ),
    "scheduler.delay_steps": row(
        Fit.EXACT,
        "scheduler.type",
        "DeepSpeed's warm-ups always wait for one update",
        unless("constant without warm-up", lambda cfg: _type_of(cfg) is None),
        _AHEAD,
        approximate(
            "not 1 with a warm-up",
            lambda cfg: bool(cfg.scheduler.warmup_steps) and cfg.scheduler.delay_steps != 1,
            "DeepSpeed's warm-ups wait for one update; everything is one update later",
        ),
        approximate(
            "not 0 without a warm-up",
            lambda cfg: not cfg.scheduler.warmup_steps and bool(cfg.scheduler.delay_steps),
            "the schedule begins at once; torch's classes do not wait",
        ),
    ),
    "scheduler.total_steps": Rule(
        Fit.EXACT,
        f"{_P}total_num_steps, {_P}total_iters, {_P}T_max",
        to=_total_of,
        when=(_NO_STAGES, _BUILT, _TOO_SHORT),
        auto=True,
    ),
    "scheduler.min_lr_ratio": exact(
        f"{_P}warmup_min_lr, {_P}cos_min_ratio, {_P}end_factor, {_P}eta_min", _NO_STAGES, _BUILT, to=_floor_of
    ),
    **asked(Fit.NEEDS_INPUT, SCRIPT, {"scheduler.decay_steps": _WSD, "scheduler.decay_type": _WSD}),
}
