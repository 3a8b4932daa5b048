"""The optimizer: what DeepSpeed's section says, and how it says the fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config import Config, value_at
from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.contract.entries import DocumentValues, Key, KeyEffect, Undecided, Unreadable
from unishard.contract.field_rows import exact, no_key, row
from unishard.contract.key_rows import boolean, drops, number
from unishard.contract.render import AUTO
from unishard.contract.rules import NO_KEY, SCRIPT, Fit, Rule, approximate, equivalent, is_, unless, unsupported
from unishard_arguments.deepspeed.facts import ARGUMENTS, dropped, quiet, undecided

_P = "optimizer.params."
_NAMES = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd", "adagrad": "adagrad", "lion": "lion", "muon": "muon"}
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
    **dict.fromkeys(
        ("muadam", "muadamw", "musgd"), "scales rates by the width of each layer; build it in the training script (mup)"
    ),
}
_CHOOSES = (
    "DeepSpeed takes every weight of two dimensions or more whose name has neither embed nor lm_head as a matrix, "
    "unishard those of repeated blocks"
)
_DECOUPLES = "decides, with the type, whether weight decay is decoupled"
_COUPLED = "DeepSpeed adds the weight decay of what is no matrix to its gradients; here it is decoupled"
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
    if name == "muon":
        return _assumed_of_muon(document)
    torchs = quiet(boolean, document.get(f"{_P}torch_adam"), False)
    decay = 0.01 if name == "adamw" and torchs else 0.0
    rate = 0.01 if name == "adagrad" else 0.001
    return {f"{_P}lr": rate, f"{_P}weight_decay": decay} | ({f"{_P}betas": [0.9, 0.999]} if name == "lion" else {})


def _assumed_of_muon(document: DocumentValues) -> dict[str, Any]:
    """Of both of its halves (DeepSpeed 0.19.8, runtime/zero/muon/original_muon.py, MuonWithAuxAdam)."""
    given = {name for name in ("lr", "muon_lr", "adam_lr") if document.get(f"{_P}{name}") is not None}
    rates: dict[str, Any] = {"lr": 0.02} if not given & {"lr", "muon_lr"} else {}
    rates |= {"adam_lr": 3e-4} if not given & {"lr", "adam_lr"} else {}
    rates |= _DEFAULTS_OF_MUON
    return {f"{_P}{name}": value for name, value in rates.items()}


_DEFAULTS_OF_MUON: Mapping[str, Any] = {"betas": [0.9, 0.95], "eps": 1e-10, "weight_decay": 0.0}


def _base_lr(document: DocumentValues) -> Any:
    """The rate that the optimizer's section says: a number, `Undecided`, or None where it says nothing."""
    value = document.get(f"{_P}lr")
    if _name(document) == "muon" and document.get(f"{_P}muon_lr") is not None:
        value = document.get(f"{_P}muon_lr")
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
        raise Unreadable(
            f"must be Adam, AdamW, SGD, Adagrad, Lion or Muon, got {value!r}; build it in the training script", value
        )
    if name == "muon":
        return KeyEffect(Fit.APPROXIMATE, _CHOOSES, {"optimizer.name": name})
    adam = type_name == "adam" and name == "adamw"
    note = 'DeepSpeed\'s "Adam" decouples the weight decay unless adam_w_mode is false, so it is AdamW' if adam else ""
    return KeyEffect(note=note, fields={"optimizer.name": name})


def _rate(value: Any, document: DocumentValues) -> KeyEffect:
    if value != AUTO:
        number(0)(value)
    if _name(document) == "muon" and document.get(f"{_P}muon_lr") is not None:
        if document.get(f"{_P}adam_lr") is None:
            return _rate_of_adam(value, document)
        return dropped("muon_lr and adam_lr count instead")
    peak, own = peak_of(document), _base_lr(document)
    if own != peak:
        return dropped("the scheduler's warmup_max_lr is written over it")
    return _decided("optimizer.lr", peak)


def _rate_of_muon(value: Any, document: DocumentValues) -> KeyEffect:
    if _name(document) != "muon":
        return dropped("belongs to Muon")
    if _base_lr(document) != peak_of(document):
        return dropped("the scheduler's warmup_max_lr is written over it")
    return KeyEffect(fields={"optimizer.lr": number(0)(value)})


def _rate_of_adam(value: Any, document: DocumentValues) -> KeyEffect:
    """The rate of the parameters that are no matrices: `adam_lr`, or else `lr` beside `muon_lr`."""
    if _name(document) != "muon":
        return dropped("belongs to Muon")
    if document.get("scheduler.type") in ("WarmupLR", "WarmupDecayLR"):
        return dropped("the scheduler writes one rate over all")
    if value == AUTO:
        return undecided(f"learning_rate {ARGUMENTS}", "optimizer.adamw_lr")
    return KeyEffect(fields={"optimizer.adamw_lr": number(0)(value)})


def _per_head(value: Any, document: DocumentValues) -> KeyEffect:
    if not boolean(value) or _name(document) != "muon":
        return dropped("is off")
    return KeyEffect(Fit.UNSUPPORTED, "makes each head orthogonal by itself; set it to false")


def _decided(field: str, value: Any) -> KeyEffect:
    if isinstance(value, Undecided):
        return undecided(value.who, field)
    return KeyEffect(fields={field: value})


def _param(name: str, convert: Any) -> Key:
    def read(value: Any, document: DocumentValues) -> KeyEffect:
        if value == AUTO and name in _ARGUMENTS:
            return _decided(f"optimizer.{name}", Undecided(f"{_ARGUMENTS[name]} {ARGUMENTS}"))
        return KeyEffect(fields={f"optimizer.{name}": convert(value)})

    return Key(read, (f"optimizer.{name}",))


def _betas(value: Any) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise Unreadable(f"must be two numbers, got {value!r}; write [0.9, 0.999]", value)
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


def _decoupled(value: Any, document: DocumentValues) -> KeyEffect:
    decays = document.get(f"{_P}weight_decay") not in (None, 0)
    if _name(document) == "muon" and decays and not boolean(value):
        return KeyEffect(Fit.APPROXIMATE, _COUPLED)
    return dropped(_DECOUPLES)


def _fp32_states(value: Any, document: DocumentValues) -> KeyEffect:
    return (
        dropped("is on: the state is fp32")
        if boolean(value)
        else dropped("rounds DeepSpeedCPUAdam's state; elsewhere it stays in fp32")
    )


KEYS: Mapping[str, Key] = {
    "optimizer.type": Key(_type, ("optimizer.name",)),
    f"{_P}lr": Key(_rate, ("optimizer.lr",)),
    f"{_P}betas": _param("betas", _betas),
    f"{_P}eps": _param("eps", number(0)),
    f"{_P}weight_decay": _param("weight_decay", number(0)),
    f"{_P}momentum": _param("momentum", number(0)),
    f"{_P}nesterov": _param("nesterov", boolean),
    f"{_P}amsgrad": _param("amsgrad", boolean),
    f"{_P}muon_lr": Key(_rate_of_muon, ("optimizer.lr",)),
    f"{_P}adam_lr": Key(_rate_of_adam, ("optimizer.adamw_lr",)),
    f"{_P}ns_method": drops("the same iterations, by other products"),
    f"{_P}per_head_muon": Key(_per_head),
    f"{_P}adam_w_mode": Key(_decoupled, (), Fit.IGNORED, _DECOUPLES),
    f"{_P}torch_adam": drops("whether torch's class steps or DeepSpeed's; same results to rounding"),
    f"{_P}bias_correction": Key(_bias_correction),
    f"{_P}max_grad_norm": Key(_max_grad_norm, ("training.gradient_clipping",)),
    f"{_P}fp32_optimizer_states": Key(_fp32_states),
    **{
        f"{_P}{name}": drops("which kernel steps; same results")
        for name in ("foreach", "fused", "set_grad_none", "capturable")
    },
    **{f"{_P}{name}": drops("belongs to an optimizer of its own") for name in _OTHERS},
    "optimizer.legacy_fusion": drops("which kernel steps in fp16; same results"),
}

_TYPES = {
    "adamw": "AdamW",
    "adam": "Adam",
    "sgd": "SGD",
    "adagrad": "Adagrad",
    "lion": "Lion",
    "muon": "Muon",
    "adamw_8bit": "AdamW",
}
_ADAMS = ("adamw", "adam", "adamw_8bit")
_FULL = (
    "moments of 32 bits, more memory: a file of DeepSpeed's names no optimizer of 8 bits; pass "
    "bitsandbytes.optim.AdamW8bit to deepspeed.initialize"
)


def _params(**settings: Any) -> Native:
    return {"optimizer": {"params": settings}}


def _name_of(cfg: Config, topology: Topology) -> Native:
    name = cfg.optimizer.name
    params: dict[str, Any] = {"adam_w_mode": False} if name == "adam" else {}
    if name in _ADAMS and cfg.offload.optimizer != "nvme":
        params["torch_adam"] = True
    if name == "muon":
        params["ns_method"] = "standard"  # the other one iterates in fp16
    # Stage 3 averages whole gradients for Muon (DeepSpeed 0.19.8, runtime/zero/stage3.py).
    whole = name == "muon" and cfg.sharding.within_group == "full_shard"
    return {"optimizer": {"type": _TYPES[name], "params": params}} | (
        {"zero_optimization": {"reduce_scatter": False}} if whole else {}
    )


def _warms(cfg: Config) -> bool:
    """Whether DeepSpeed's schedule writes one rate over those of all groups."""
    return bool(cfg.scheduler.warmup_steps) and cfg.scheduler.name in ("constant", "linear")


def _lr_of(cfg: Config, topology: Topology) -> Native:
    rates = {"muon_lr" if cfg.optimizer.name == "muon" else "lr": cfg.optimizer.lr}
    return _params(**rates) | ({"scheduler": {"params": {"warmup_max_lr": cfg.optimizer.lr}}} if _warms(cfg) else {})


def _adamw_lr_of(cfg: Config, topology: Topology) -> Native:
    rate = cfg.optimizer.lr if cfg.optimizer.adamw_lr is None else cfg.optimizer.adamw_lr
    return _params(adam_lr=rate) if cfg.optimizer.name == "muon" else {}


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
        approximate(*is_("optimizer.name", "adamw_8bit"), _FULL),
        to=_name_of,
    ),
    "optimizer.lr": Rule(Fit.EXACT, f"{_P}lr, scheduler.params.warmup_max_lr", to=_lr_of, auto=True),
    "optimizer.betas": _plain("betas", (*_ADAMS, "lion", "muon"), auto=True),
    "optimizer.eps": _plain("eps", (*_ADAMS, "adagrad", "muon"), auto=True),
    "optimizer.amsgrad": _flag("amsgrad", _ADAMS),
    "optimizer.momentum": _flag("momentum", ("sgd", "muon")),
    "optimizer.nesterov": exact(
        f"{_P}nesterov",
        unsupported(
            "false with muon",
            lambda cfg: cfg.optimizer.name == "muon" and not cfg.optimizer.nesterov,
            "DeepSpeed's Muon always uses Nesterov momentum",
        ),
        to=lambda cfg, topology: (
            _params(nesterov=True) if cfg.optimizer.name == "sgd" and cfg.optimizer.nesterov else {}
        ),
    ),
    "optimizer.matrices": row(
        Fit.UNSUPPORTED,
        NO_KEY,
        "DeepSpeed chooses matrices by shape and name",
        approximate("auto", lambda cfg: cfg.optimizer.matrices == "auto", _CHOOSES),
    ),
    "optimizer.adamw_lr": exact(
        f"{_P}adam_lr",
        unsupported(
            "another than lr, with a warm-up that is constant or linear afterwards",
            lambda cfg: _warms(cfg) and cfg.optimizer.adamw_lr not in (None, cfg.optimizer.lr),
            "WarmupLR and WarmupDecayLR write one rate over all",
        ),
        to=_adamw_lr_of,
    ),
    "optimizer.adjust_lr": no_key(
        "DeepSpeed's Muon adjusts as original does",
        lambda cfg: cfg.optimizer.adjust_lr == "original",
        "original",
        Fit.UNSUPPORTED,
    ),
    "optimizer.ns_steps": no_key(
        "DeepSpeed's Muon makes 5 iterations", lambda cfg: cfg.optimizer.ns_steps == 5, "5", Fit.UNSUPPORTED
    ),
    "optimizer.ns_dtype": no_key(
        "DeepSpeed's Muon iterates in bf16", lambda cfg: cfg.optimizer.ns_dtype == "bf16", "bf16", Fit.APPROXIMATE
    ),
    "optimizer.weight_decay": _plain("weight_decay", tuple(_TYPES), auto=True),
    "optimizer.no_decay": row(
        Fit.NEEDS_INPUT, SCRIPT, f"{_GROUPS}", unless("empty", lambda cfg: not cfg.optimizer.no_decay)
    ),
    "optimizer.groups": row(
        Fit.NEEDS_INPUT, SCRIPT, f"{_GROUPS}", unless("empty", lambda cfg: not cfg.optimizer.groups)
    ),
}
