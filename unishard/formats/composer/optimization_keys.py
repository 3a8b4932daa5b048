"""What `optimizer`, `scheduler` and the clipping algorithm say (Composer 0.32, llm-foundry 0.22)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from unishard.config.describe import shown
from unishard.config.nested import Native
from unishard.contract.entries import DocumentValues, Key, KeyEffect, Undecided, Unreadable
from unishard.contract.key_rows import boolean, drops, number, one_of, sets, text
from unishard.contract.rules import Fit
from unishard.formats.composer.batches import updates


def _groups(value: Any, given: DocumentValues) -> KeyEffect:
    """What the groups say."""
    if value in (None, []):
        return KeyEffect(Fit.IGNORED, "is empty")
    if not isinstance(value, list):
        raise Unreadable(
            f"must be a list of groups, got {shown(value)}; write [{{param_str_match: norm, weight_decay: 0.0}}]"
        )
    groups = [_group(item, given) for item in value]
    return KeyEffect(fields={"optimizer.groups": groups})


def _group(item: Any, given: DocumentValues) -> Native:
    if not isinstance(item, Mapping) or "param_str_match" not in item:
        raise Unreadable(
            f"must have param_str_match, got {shown(item)}; write {{param_str_match: norm, weight_decay: 0.0}}"
        )
    unknown = next((key for key in item if key not in ("param_str_match", "lr", "weight_decay")), None)
    if unknown is not None:
        raise Unreadable(f"takes only lr and weight_decay, got {unknown}; remove it")
    if len(item) == 1:
        raise Unreadable(f"must have an lr or a weight_decay, got {shown(item)}; write one of them")
    group: Native = {"params": [text(item["param_str_match"])]}
    rate = number(0)(item.get("lr", given.get("optimizer.lr")))
    decay = number(0)(item.get("weight_decay", given.get("optimizer.weight_decay") or 0.0))
    if "lr" in item:
        group["lr"] = rate
    if "weight_decay" in item or "lr" in item:
        group["weight_decay"] = _divided(decay, rate, given)
    return group


def _divided(decay: float, rate: float, given: DocumentValues) -> float:
    if not decay or not str(given.get("optimizer.name")).lower().startswith("decoupled_"):
        return decay
    if not rate:
        raise Unreadable("must have weight_decay 0 if lr is 0; write 0")
    return decay / rate


_OPTIMIZERS: Mapping[str, str] = {
    "decoupled_adamw": "adamw",
    "decoupled_lionw": "lion",
    "decoupled_sgdw": "sgd",
    "adamw": "adamw",
    "adam": "adam",
    "sgd": "sgd",
    "adagrad": "adagrad",
}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "decoupled_adamw": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 1e-5},
    "decoupled_lionw": {"lr": 1e-4, "betas": [0.9, 0.99], "weight_decay": 0.0},
    "decoupled_sgdw": {"weight_decay": 0.0},
}
"""Of composer.optim and llmfoundry.optim, where they are not torch's."""
_DECOUPLED = "divided by the first lr: Composer decays by weight_decay x lr / first lr"
_SHAPES = {
    "cosine_with_warmup": "cosine",
    "cosine_decay_with_warmup": "cosine",
    "linear_decay_with_warmup": "linear",
    "linear_with_warmup": "linear",
    "constant_with_warmup": "constant",
    "constant": "constant",
    "cosine": "cosine",
    "cosine_annealing": "cosine",
    "linear": "linear",
}


def defaults_of(optimizer: Any) -> dict[str, Any]:
    """What the named optimizer assumes where it is silent, by dotted key."""
    name = str(optimizer.get("name", "")).lower() if isinstance(optimizer, Mapping) else ""
    return {f"optimizer.{key}": value for key, value in _DEFAULTS.get(name, {}).items() if key not in optimizer}


def _kind(given: DocumentValues) -> str:
    return str(given.get("optimizer.name")).strip().lower()


def _of(kinds: tuple[str, ...], field: str, convert: Callable[[Any], Any]) -> Key:
    """A setting that only some optimizers have."""

    def read(value: Any, given: DocumentValues) -> KeyEffect:
        found = convert(value)
        if _OPTIMIZERS.get(_kind(given), "adamw") not in kinds:
            return KeyEffect(Fit.IGNORED, "belongs to another optimizer")
        return KeyEffect(fields={field: found})

    return Key(read, field)


def _betas(value: Any) -> list[float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise Unreadable(f"must be two numbers, got {shown(value)}; write [0.9, 0.95]")
    return [number(0, 1)(beta) for beta in value]


def _decay(value: Any, given: DocumentValues) -> KeyEffect:
    decay, kind = number(0)(value), _kind(given)
    field = "optimizer.weight_decay"
    if not kind.startswith("decoupled_") or not decay:
        return KeyEffect(fields={field: decay})
    if kind == "decoupled_sgdw":
        raise Unreadable("must be 0 with decoupled_sgdw; write 0, or use decoupled_adamw")
    rate = number(0)(given.get("optimizer.lr"))
    if not rate:
        raise Unreadable("must be 0 where the learning rate is 0; write 0")
    return KeyEffect(Fit.EQUIVALENT, _DECOUPLED, {field: decay / rate})


def _shape(value: Any, given: DocumentValues) -> KeyEffect:
    name = one_of(_SHAPES)(value)
    if name != "constant" and _climbs(given):
        note = "the warm-up lasts as long as the training, so that the rate never falls"
        return KeyEffect(Fit.EXACT, note, {"scheduler.name": "constant"})
    return KeyEffect(fields={"scheduler.name": name})


def _climbs(given: DocumentValues) -> bool:
    """Whether the warm-up lasts at least as long as the training, as in a trial run of a few updates."""
    whole = (
        given.get("scheduler.t_max")
        if given.get("scheduler.t_max") not in (None, "1dur", "1.0dur")
        else given.get("max_duration")
    )
    warmup = given.get("scheduler.t_warmup") or given.get("scheduler.warmup_time")
    try:
        first, last = updates(warmup, given), updates(whole, given)
    except Unreadable:
        return False
    return isinstance(first, int) and isinstance(last, int) and first >= last > 0


def _falls(given: DocumentValues) -> bool:
    return not _climbs(given) and _SHAPES.get(str(given.get("scheduler.name")).strip().lower()) in ("linear", "cosine")


def _warmup(value: Any, given: DocumentValues) -> KeyEffect:
    return _timed("scheduler.warmup_steps", updates(value, given))


def _timed(field: str, found: int | Undecided) -> KeyEffect:
    if isinstance(found, Undecided):
        return KeyEffect(Fit.NEEDS_INPUT, f"the number of updates comes from {found.who}", {field: found})
    return KeyEffect(fields={field: found})


def _end(value: Any, given: DocumentValues) -> KeyEffect:
    found = updates(value, given)
    if not _falls(given):
        return KeyEffect(Fit.IGNORED, "the schedule does not fall")
    return _timed("scheduler.total_steps", found)


def _duration(value: Any, given: DocumentValues) -> KeyEffect:
    if value is None:
        return KeyEffect(Fit.IGNORED, "is not set")
    found = updates(value, given)
    if not _falls(given) or given.get("scheduler.t_max") not in (None, "1dur", "1.0dur"):
        return KeyEffect(
            Fit.NEEDS_INPUT,
            "how long to train is the training script's to decide; end its loop there",
            copy_verbatim=True,
        )
    effect = _timed("scheduler.total_steps", found)
    note = f"{effect.note}; end the loop there as well" if effect.note else ""
    return KeyEffect(effect.fit, note, effect.fields, copy_verbatim=True)


def _least(value: Any, given: DocumentValues) -> KeyEffect:
    found = number(0, 1)(value)
    return (
        KeyEffect(fields={"scheduler.min_lr_ratio": found})
        if _falls(given)
        else KeyEffect(Fit.IGNORED, "the schedule does not fall")
    )


def _only(expected: float, why: str) -> Key:
    """A number that unishard's schedules do not have but at one value."""

    def read(value: Any, given: DocumentValues) -> KeyEffect:
        found = number()(value)
        return KeyEffect(Fit.IGNORED, "is that anyway") if found == expected else KeyEffect(Fit.UNSUPPORTED, why)

    return Key(read, "", Fit.UNSUPPORTED, why)


def _clipping(value: Any, given: DocumentValues) -> KeyEffect:
    kind = str(value).strip().lower()
    if kind != "norm":
        return KeyEffect(Fit.UNSUPPORTED, f"only clipping by the global norm is supported, not by {kind}; write norm")
    return KeyEffect(Fit.IGNORED, "is what gradient_clipping does")


def _threshold(value: Any, given: DocumentValues) -> KeyEffect:
    kind = given.get("algorithms.gradient_clipping.clipping_type")
    if kind is not None and str(kind).strip().lower() != "norm":
        return KeyEffect(Fit.UNSUPPORTED, "belongs to a clipping_type that is not supported; write clipping_type: norm")
    return _clip(value, given)


def _clip(value: Any, given: DocumentValues) -> KeyEffect:
    limit = None if value is None else number()(value)
    return KeyEffect(fields={"training.gradient_clipping": limit if limit is not None and limit > 0 else None})


def _scaled(value: Any, given: DocumentValues) -> KeyEffect:
    if boolean(value):
        return KeyEffect(Fit.UNSUPPORTED, "a warmup that scales with the run is not supported; write a number of steps")
    return KeyEffect(Fit.IGNORED, "is off")


_EXEMPT = "exempts by name; the script exempts all vectors: add patterns for other names"


def _exempt(value: Any, given: DocumentValues) -> KeyEffect:
    if not boolean(value) or not given.get("optimizer.weight_decay"):
        return KeyEffect(Fit.IGNORED, "nothing decays" if boolean(value) else "is off")
    return KeyEffect(Fit.EQUIVALENT, _EXEMPT, {"optimizer.no_decay": [r"(^|\.)bias$", "(?i)norm"]})


def _left(what: str) -> Key:
    return Key(lambda value, given: KeyEffect(Fit.NEEDS_INPUT, what), "", Fit.NEEDS_INPUT, what)


OPTIMIZATION: Mapping[str, Key] = {
    "optimizer.name": sets("optimizer.name", one_of(_OPTIMIZERS)),
    "optimizer.lr": sets("optimizer.lr", number(0)),
    "optimizer.betas": _of(("adamw", "adam", "lion"), "optimizer.betas", _betas),
    "optimizer.eps": _of(("adamw", "adam", "adagrad"), "optimizer.eps", number(0)),
    "optimizer.amsgrad": _of(("adamw", "adam"), "optimizer.amsgrad", boolean),
    "optimizer.momentum": _of(("sgd",), "optimizer.momentum", number(0)),
    "optimizer.nesterov": _of(("sgd",), "optimizer.nesterov", boolean),
    "optimizer.weight_decay": Key(_decay, "optimizer.weight_decay", Fit.EQUIVALENT, _DECOUPLED),
    "optimizer.param_groups": Key(_groups, "optimizer.groups"),
    "optimizer.filter_bias_norm_wd": Key(_exempt, "optimizer.no_decay", Fit.EQUIVALENT, _EXEMPT),
    "optimizer.disable_grad": _left("freeze these parameters in the training script before prepare"),
    "optimizer.foreach": drops("affects only time"),
    "optimizer.fused": drops("affects only time"),
    "scheduler.name": Key(_shape, "scheduler.name"),
    "scheduler.t_warmup": Key(_warmup, "scheduler.warmup_steps"),
    "scheduler.warmup_time": Key(_warmup, "scheduler.warmup_steps", note="an older name of t_warmup"),
    "scheduler.t_max": Key(_end, "scheduler.total_steps"),
    "scheduler.alpha_f": Key(_least, "scheduler.min_lr_ratio"),
    "scheduler.alpha_i": _only(1, "a schedule begins at the learning rate; multiply that instead"),
    "scheduler.alpha": _only(1, "a constant schedule keeps the learning rate; multiply that instead"),
    "scheduler.scale_warmup": Key(_scaled),
    "max_duration": Key(_duration, "scheduler.total_steps", Fit.EXACT, "t_max is by default the full training"),
    "algorithms.gradient_clipping.clipping_type": Key(_clipping),
    "algorithms.gradient_clipping.clipping_threshold": Key(_threshold, "training.gradient_clipping"),
    "algorithms.fused_layernorm": drops("another kernel for the same norms: affects only time"),
    "algorithms.low_precision_layernorm": drops("norms run in the compute dtype"),
    "grad_clip_norm": Key(_clip, "training.gradient_clipping", note="an older form of algorithms.gradient_clipping"),
}
"""Their rows."""
