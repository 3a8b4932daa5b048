"""The optimizer: what DeepSpeed's section says, and how it says the fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config import Config, value_at
from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.contract.entries import DocumentValues, Key, KeyEffect, Undecided, Unreadable
from unishard.contract.field_rows import exact, row
from unishard.contract.key_rows import boolean, drops, number
from unishard.contract.render import AUTO
from unishard.contract.rules import SCRIPT, Fit, Rule, equivalent, is_, unless
from unishard_arguments.deepspeed.facts import ARGUMENTS, dropped, quiet, undecided

_P = "optimizer.params."
_NAMES = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd", "adagrad": "adagrad", "lion": "lion"}
_ARGUMENTS = {
    "lr": "learning_rate",
    "betas": "adam_beta1 and adam_beta2",
    "eps": "adam_epsilon",
    "weight_decay": "weight_decay",
}
_SCALED = "needs the norm of each whole tensor, which is sharded; choose adamw or lion"
_COMPRESSED = "sends compressed gradients, and was removed in DeepSpeed 0.19.8; choose adamw"
_REFUSED = {
    "lamb": _SCALED,
    "fusedlamb": _SCALED,
    "onebitlamb": _COMPRESSED,
    "onebitadam": _COMPRESSED,
    "zerooneadam": _COMPRESSED,
    "muon": "needs whole matrices, which are sharded; choose adamw or lion",
    **dict.fromkeys(
        ("muadam", "muadamw", "musgd"), "scales rates by the width of each layer; build it in the training script (mup)"
    ),
}
_OTHERS = (
    *(
        "freeze_step",
        "cuda_aware",
        "comm_backend_name",
        "coeff_beta",
        "factor_max",
        "factor_min",
        "factor_threshold",
        "max_coeff",
    ),
    *(
        "min_coeff",
        "var_freeze_step",
        "var_update_scaler",
        "local_step_scaler",
        "local_step_clipper",
        "muon_lr",
        "adam_lr",
        "ns_method",
    ),
)


def _name(document: DocumentValues) -> str | None:
    """The value of `optimizer.name`; None where there is none, or one that is not supported."""
    name = str(document.get("optimizer.type") or "").strip().lower()
    if name == "adam" and not quiet(boolean, document.get(f"{_P}adam_w_mode"), True):
        return "adam"
    return _NAMES.get(name)


def assumed(document: DocumentValues) -> dict[str, Any]:
    """Defaults of the class that DeepSpeed would build, where they are not the schema's."""
    name = _name(document)
    if name is None:
        return {}
    torchs = quiet(boolean, document.get(f"{_P}torch_adam"), False)
    decay = 0.01 if name == "adamw" and torchs else 0.0
    rate = 0.01 if name == "adagrad" else 0.001
    return {f"{_P}lr": rate, f"{_P}weight_decay": decay} | ({f"{_P}betas": [0.9, 0.999]} if name == "lion" else {})


def _base_lr(document: DocumentValues) -> Any:
    """The rate that the optimizer's section says: a number, `Undecided`, or None where it says nothing."""
    value = document.get(f"{_P}lr")
    value = assumed(document).get(f"{_P}lr") if value is None else value
    return Undecided(f"learning_rate {ARGUMENTS}") if value == AUTO else quiet(number(0), value)


def peak_of(document: DocumentValues) -> Any:
    """The rate at the top of the schedule, which DeepSpeed's warm-ups write over that of the optimizer."""
    if document.get("scheduler.type") not in ("WarmupLR", "WarmupDecayLR"):
        return _base_lr(document)
    top = document.get("scheduler.params.warmup_max_lr")
    peak = quiet(number(0), top)
    if peak is None and top is None and document.get("scheduler.type") == "WarmupDecayLR":
        peak = 0.001
    if peak is not None:
        return peak
    return (
        _base_lr(document)
        if _base_lr(document) is not None
        else Undecided(f"learning_rate {ARGUMENTS}")
        if top == AUTO
        else None
    )


def _type(value: Any, document: DocumentValues) -> KeyEffect:
    type_name = str(value).strip().lower()
    if type_name in _REFUSED:
        return KeyEffect(Fit.UNSUPPORTED, f"{value} {_REFUSED[type_name]}")
    name = _name(document)
    if name is None:
        raise Unreadable(f"must be Adam, AdamW, SGD, Adagrad or Lion, got {value!r}; build it in the training script")
    adam = type_name == "adam" and name == "adamw"
    note = 'DeepSpeed\'s "Adam" decouples the weight decay unless adam_w_mode is false, so it is AdamW' if adam else ""
    return KeyEffect(note=note, fields={"optimizer.name": name})


def _rate(value: Any, document: DocumentValues) -> KeyEffect:
    if value != AUTO:
        number(0)(value)
    peak, own = peak_of(document), _base_lr(document)
    if own != peak:
        return dropped("the scheduler's warmup_max_lr is written over it")
    return _decided("optimizer.lr", peak)


def _decided(field: str, value: Any) -> KeyEffect:
    if isinstance(value, Undecided):
        return undecided(value.who, field)
    return KeyEffect(fields={field: value})


def _param(name: str, convert: Any) -> Key:
    def read(value: Any, document: DocumentValues) -> KeyEffect:
        if value == AUTO and name in _ARGUMENTS:
            return _decided(f"optimizer.{name}", Undecided(f"{_ARGUMENTS[name]} {ARGUMENTS}"))
        return KeyEffect(fields={f"optimizer.{name}": convert(value)})

    return Key(read, f"optimizer.{name}")


def _betas(value: Any) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise Unreadable(f"must be two numbers, got {value!r}; write [0.9, 0.999]")
    first, second = map(number(0, 1), value)
    return first, second


def _bias_correction(value: Any, document: DocumentValues) -> KeyEffect:
    if boolean(value) or _name(document) not in ("adamw", "adam"):
        return dropped("is on, as in torch") if boolean(value) else dropped("belongs to Adam and Lamb")
    note = "torch's Adam corrects its moments, so about the first 1 / (1 - beta2) updates differ"
    return KeyEffect(Fit.APPROXIMATE, note)


def _max_grad_norm(value: Any, document: DocumentValues) -> KeyEffect:
    note = "DeepSpeed 0.19.8 refuses it here and reads gradient_clipping"
    if "gradient_clipping" in document:
        return KeyEffect(Fit.IGNORED, f"{note}, which is there", rejected_upstream=True)
    return KeyEffect(note=note, fields={"training.gradient_clipping": number(0)(value) or None}, rejected_upstream=True)


def _fp32_states(value: Any, document: DocumentValues) -> KeyEffect:
    return (
        dropped("is on: the state is fp32")
        if boolean(value)
        else dropped("rounds DeepSpeedCPUAdam's state; elsewhere it stays in fp32")
    )


KEYS: Mapping[str, Key] = {
    "optimizer.type": Key(_type, "optimizer.name"),
    f"{_P}lr": Key(_rate, "optimizer.lr"),
    f"{_P}betas": _param("betas", _betas),
    f"{_P}eps": _param("eps", number(0)),
    f"{_P}weight_decay": _param("weight_decay", number(0)),
    f"{_P}momentum": _param("momentum", number(0)),
    f"{_P}nesterov": _param("nesterov", boolean),
    f"{_P}amsgrad": _param("amsgrad", boolean),
    f"{_P}adam_w_mode": drops("decides, with the type, whether weight decay is decoupled"),
    f"{_P}torch_adam": drops("whether torch's class steps or DeepSpeed's; same results to rounding"),
    f"{_P}bias_correction": Key(_bias_correction),
    f"{_P}max_grad_norm": Key(_max_grad_norm, "training.gradient_clipping"),
    f"{_P}fp32_optimizer_states": Key(_fp32_states),
    **{
        f"{_P}{name}": drops("which kernel steps; same results")
        for name in ("foreach", "fused", "set_grad_none", "capturable")
    },
    **{f"{_P}{name}": drops("belongs to an optimizer of its own") for name in _OTHERS},
    "optimizer.legacy_fusion": drops("which kernel steps in fp16; same results"),
}

_TYPES = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "adagrad": "Adagrad", "lion": "Lion"}
_ADAMS = ("adamw", "adam")


def _params(**settings: Any) -> Native:
    return {"optimizer": {"params": settings}}


def _name_of(cfg: Config, topology: Topology) -> Native:
    name = cfg.optimizer.name
    params: dict[str, Any] = {"adam_w_mode": False} if name == "adam" else {}
    if name in _ADAMS and cfg.offload.optimizer != "nvme":
        params["torch_adam"] = True
    return {"optimizer": {"type": _TYPES[name], "params": params}}


def _lr_of(cfg: Config, topology: Topology) -> Native:
    warms = cfg.scheduler.warmup_steps and cfg.scheduler.name in ("constant", "linear")
    return _params(lr=cfg.optimizer.lr) | (
        {"scheduler": {"params": {"warmup_max_lr": cfg.optimizer.lr}}} if warms else {}
    )


def _plain(field: str, names: tuple[str, ...], *, auto: bool = False) -> Rule:
    path = f"optimizer.{field}"

    def to(cfg: Config, topology: Topology) -> Native:
        value = value_at(cfg, path)
        return (
            _params(**{field: list(value) if isinstance(value, tuple) else value})
            if cfg.optimizer.name in names
            else {}
        )

    return Rule(Fit.EXACT, f"{_P}{field}", to=to, auto=auto)


def _flag(field: str, names: tuple[str, ...]) -> Rule:
    path = f"optimizer.{field}"

    def to(cfg: Config, topology: Topology) -> Native:
        return _params(**{field: value_at(cfg, path)}) if cfg.optimizer.name in names and value_at(cfg, path) else {}

    return exact(f"{_P}{field}", to=to)


_GROUPS = "pass parameter groups to deepspeed.initialize(model_parameters=[...])"

RULES: Mapping[str, Rule] = {
    "optimizer.name": exact(
        "optimizer.type",
        equivalent(*is_("optimizer.name", "lion"), "DeepSpeed's own kernel (FusedLion or DeepSpeedCPULion)"),
        to=_name_of,
    ),
    "optimizer.lr": Rule(Fit.EXACT, f"{_P}lr, scheduler.params.warmup_max_lr", to=_lr_of, auto=True),
    "optimizer.betas": _plain("betas", (*_ADAMS, "lion"), auto=True),
    "optimizer.eps": _plain("eps", (*_ADAMS, "adagrad"), auto=True),
    "optimizer.amsgrad": _flag("amsgrad", _ADAMS),
    "optimizer.momentum": _flag("momentum", ("sgd",)),
    "optimizer.nesterov": _flag("nesterov", ("sgd",)),
    "optimizer.weight_decay": _plain("weight_decay", tuple(_TYPES), auto=True),
    "optimizer.no_decay": row(
        Fit.NEEDS_INPUT, SCRIPT, f"{_GROUPS}", unless("empty", lambda cfg: not cfg.optimizer.no_decay)
    ),
    "optimizer.groups": row(
        Fit.NEEDS_INPUT, SCRIPT, f"{_GROUPS}", unless("empty", lambda cfg: not cfg.optimizer.groups)
    ),
}
