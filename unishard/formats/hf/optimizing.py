"""What TrainingArguments say about the optimizer (transformers 5.23, training_args.py and trainer_optimizer.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from unishard.config import Config, Scheduler
from unishard.config.describe import shown
from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.contract.entries import DocumentValues, Key, KeyEffect, Unreadable, left_out
from unishard.contract.field_rows import asked, copied, exact, row
from unishard.contract.key_rows import number, refuses, sets
from unishard.contract.rules import SCRIPT, Fit, Rule, approximate, equivalent, needs_input, unless
from unishard.formats.hf.scheduling import DECAYS
from unishard.formats.names import names

NO_DECAY = r"(?i)bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)"
"""The names that `Trainer.get_decay_parameter_names` exempts (transformers 5.23, trainer.py), as one pattern."""

ADAM = ("adamw", "adam", "adamw_8bit")
_EIGHT = "8-bit state there, the dtype of the master weights here: more exact, more memory"
_EMBEDDINGS = "Trainer keeps the state of embeddings in 32 bits, which has 8 here: less memory"
_NOT_PAGED = f"its state lies in device memory and is not paged to the host; {_EMBEDDINGS}"
_TORCHAO = "bitsandbytes' kernels instead of torchao's: other blocks where a parameter is no multiple of 256 elements"
_FOUR = "4-bit state there, the dtype of the master weights here: more exact, more memory"
_PAGED = "the same algorithm; its state lies in device memory and is not paged to the host"
_NAMES: Mapping[str, tuple[str, Fit, str]] = {
    "adamw_torch": ("adamw", Fit.EXACT, ""),
    "adamw_torch_fused": ("adamw", Fit.EXACT, ""),
    "adamw_torch_xla": ("adamw", Fit.EQUIVALENT, "torch's AdamW instead of torch_xla's: the same algorithm"),
    "adamw_torch_npu_fused": ("adamw", Fit.EQUIVALENT, "torch's AdamW instead of torch_npu's: the same algorithm"),
    "adamw_hf": ("adamw", Fit.EQUIVALENT, "torch's AdamW; the removed one added eps before the bias correction"),
    "adamw_apex_fused": ("adamw", Fit.EQUIVALENT, "torch's AdamW instead of apex's: the same algorithm"),
    "adamw_anyprecision": (
        "adamw",
        Fit.APPROXIMATE,
        "state in the dtype of the master weights, without Kahan summation",
    ),
    "adamw_torch_8bit": ("adamw_8bit", Fit.APPROXIMATE, _TORCHAO),
    "adamw_torch_4bit": ("adamw", Fit.APPROXIMATE, _FOUR),
    "adamw_bnb_8bit": ("adamw_8bit", Fit.APPROXIMATE, _EMBEDDINGS),
    "adamw_8bit": ("adamw_8bit", Fit.APPROXIMATE, _EMBEDDINGS),
    "paged_adamw_32bit": ("adamw", Fit.EQUIVALENT, _PAGED),
    "paged_adamw_8bit": ("adamw_8bit", Fit.APPROXIMATE, _NOT_PAGED),
    "sgd": ("sgd", Fit.EXACT, ""),
    "adagrad": ("adagrad", Fit.EXACT, ""),
    "lion_32bit": ("lion", Fit.EQUIVALENT, "bitsandbytes' Lion there, lion-pytorch's here: the same algorithm"),
    "lion_8bit": ("lion", Fit.APPROXIMATE, _EIGHT),
    "paged_lion_32bit": ("lion", Fit.EQUIVALENT, _PAGED),
    "paged_lion_8bit": ("lion", Fit.APPROXIMATE, _EIGHT),
}
"""The optimizers of `OptimizerNames` that unishard has by name."""
_REMOVED = ("adamw_hf", "adamw_apex_fused")
"""Names that transformers 5.23 no longer takes."""

_OTHERS = names(
    "adafactor ademamix ademamix_8bit paged_ademamix_32bit paged_ademamix_8bit rmsprop rmsprop_bnb rmsprop_bnb_8bit "
    "rmsprop_bnb_32bit galore_adamw galore_adamw_8bit galore_adafactor galore_adamw_layerwise "
    "galore_adamw_8bit_layerwise galore_adafactor_layerwise lomo adalomo grokadamw schedule_free_radam "
    "schedule_free_adamw schedule_free_sgd apollo_adamw apollo_adamw_layerwise stable_adamw"
)


def _optimizer(value: Any) -> KeyEffect:
    """What the name of an optimizer says, in any case.

    Raises:
        Unreadable: No optimizer has this name.
    """
    name = str(getattr(value, "value", value)).strip().lower()
    if name in _NAMES:
        optimizer, fit, note = _NAMES[name]
        return KeyEffect(fit, note, {"optimizer.name": optimizer}, rejected_upstream=name in _REMOVED)
    if name in _OTHERS:
        why = f"{name} is not supported; build the optimizer in the training script"
        return KeyEffect(Fit.UNSUPPORTED, why)
    raise Unreadable(f"must be an optimizer of transformers, got {shown(value)}; write adamw_torch or sgd", value)


def _name_of(document: DocumentValues) -> str:
    """Unishard's name of the optimizer that a document names; empty for one that it has not."""
    try:
        effect = _optimizer(document.get("optim") or "adamw_torch")
    except Unreadable:
        return ""
    return str(effect.fields.get("optimizer.name", ""))


def _fields_of_optimizer() -> Mapping[str, Key]:
    """The rows whose meaning depends on the optimizer."""

    def belongs(field: str, names: tuple[str, ...], convert: Any) -> Any:
        def read(value: Any, document: DocumentValues) -> KeyEffect:
            name = _name_of(document)
            if name in names:
                return KeyEffect(fields={field: convert(value)})
            convert(value)
            return left_out(f"{name or document.get('optim')} has no such setting")

        return read

    def beta(other_key: str, first: bool) -> Any:
        def read(value: Any, document: DocumentValues) -> KeyEffect:
            name = _name_of(document)
            this, that = number(0, 1)(value), number(0, 1)(_or(document.get(other_key), 0.999 if first else 0.9))
            if name not in (*ADAM, "lion"):
                return left_out(f"{name or document.get('optim')} has no such setting")
            return KeyEffect(fields={"optimizer.betas": (this, that) if first else (that, this)})

        return read

    return {
        "adam_beta1": Key(beta("adam_beta2", True), ("optimizer.betas",), tool_default=0.9),
        "adam_beta2": Key(beta("adam_beta1", False), ("optimizer.betas",), tool_default=0.999),
        "adam_epsilon": Key(belongs("optimizer.eps", ADAM, number(0)), ("optimizer.eps",), tool_default=1e-8),
    }


def _or(value: Any, otherwise: float) -> Any:
    return otherwise if value is None else value


def _arguments(value: Any, document: DocumentValues) -> KeyEffect:
    """`optim_args`: text such as `momentum=0.9, nesterov=true`."""
    if value in (None, "", {}):
        return left_out("is empty")
    pairs = dict(_pairs(value))
    known = _ARGUMENTS.get(_name_of(document), {})
    strange = [key for key in pairs if key not in known]
    if strange:
        return KeyEffect(
            Fit.UNSUPPORTED, f"{', '.join(strange)}: not supported; build the optimizer in the training script"
        )
    return KeyEffect(fields={known[key][0]: known[key][1](text) for key, text in pairs.items()})


def _pairs(value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, str) or any(part.count("=") != 1 for part in value.split(",")):
        raise Unreadable(f"must be pairs such as momentum=0.9,nesterov=true, got {shown(value)}; write them so", value)
    return [(key.strip(), text.strip()) for key, _, text in (part.partition("=") for part in value.split(","))]


def _true(text: Any) -> bool:
    """As transformers reads it (trainer_optimizer.py, `_get_sgd`)."""
    return str(text).lower() in ("true", "1", "yes")


_ARGUMENTS: Mapping[str, Mapping[str, tuple[str, Any]]] = {
    "sgd": {"momentum": ("optimizer.momentum", number(0)), "nesterov": ("optimizer.nesterov", _true)},
    "adagrad": {"eps": ("optimizer.eps", number(0))},
}


def _decay(value: Any, document: DocumentValues) -> KeyEffect:
    decay = number(0)(value)
    fields: dict[str, Any] = {"optimizer.weight_decay": decay}
    if not decay:
        return KeyEffect(fields=fields)
    note = "exempts by name; Trainer exempts each nn.LayerNorm: add patterns, such as ln_1"
    return KeyEffect(Fit.EQUIVALENT, note, {**fields, "optimizer.no_decay": [NO_DECAY]})


_TARGETS = "GaLore and APOLLO are not supported; build the optimizer in the training script"


def _targets(value: Any, document: DocumentValues) -> KeyEffect:
    if value in (None, [], ""):
        return left_out("is off")
    if not any(name in str(document.get("optim")).lower() for name in ("galore", "apollo")):
        return left_out("only used with GaLore and APOLLO")
    return KeyEffect(Fit.UNSUPPORTED, _TARGETS)


OPTIMIZER: Mapping[str, Key] = {
    "optim": Key(lambda value, document: _optimizer(value), ("optimizer.name",), tool_default="adamw_torch_fused"),
    "optim_args": Key(_arguments, ("optimizer.momentum", "optimizer.nesterov", "optimizer.eps")),
    "learning_rate": sets("optimizer.lr", number(0), tool_default=5e-5),
    **_fields_of_optimizer(),
    "weight_decay": Key(_decay, ("optimizer.weight_decay", "optimizer.no_decay"), Fit.EQUIVALENT, tool_default=0.0),
    "optim_target_modules": Key(_targets, (), Fit.UNSUPPORTED, _TARGETS),
    "adafactor": refuses(
        "adafactor is not supported; build the optimizer in the training script", lambda value: value in (None, False)
    ),
}

_WRITTEN = {
    "adamw": "adamw_torch",
    "adamw_8bit": "adamw_8bit",
    "sgd": "sgd",
    "adagrad": "adagrad",
    "lion": "lion_32bit",
}


def _named(*names: str) -> Callable[[Config], bool]:
    return lambda cfg: cfg.optimizer.name in names


def _written_arguments(cfg: Config, topology: Topology) -> Native:
    """`optim_args`, which is one text."""
    chosen = cfg.optimizer
    pairs: dict[str, Any] = {}
    if chosen.name == "sgd" and chosen.momentum:
        pairs = {"momentum": chosen.momentum, **({"nesterov": "true"} if chosen.nesterov else {})}
    if chosen.name == "adagrad":
        pairs = {"eps": chosen.eps}
    return {"optim_args": ",".join(f"{key}={value}" for key, value in pairs.items())} if pairs else {}


def _betas(cfg: Config, topology: Topology) -> Native:
    beta1, beta2 = cfg.optimizer.betas
    return {"adam_beta1": beta1, "adam_beta2": beta2} if cfg.optimizer.name in (*ADAM, "lion") else {}


def _eps(cfg: Config, topology: Topology) -> Native:
    return {"adam_epsilon": cfg.optimizer.eps} if cfg.optimizer.name in ADAM else {}


_DECAYS = {here: there for there, here in DECAYS.items()}


def _schedule(cfg: Config, topology: Topology) -> Native:
    scheduler, end = cfg.scheduler, cfg.scheduler.min_lr_ratio
    if scheduler.name == "constant" or end == 1:
        return {"lr_scheduler_type": "constant_with_warmup" if scheduler.warmup_steps else "constant"}
    if scheduler.name == "wsd":
        return {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": _stages(scheduler)}
    if not end:
        return {"lr_scheduler_type": scheduler.name}
    if scheduler.name == "cosine":
        return {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": end}}
    return {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 1.0, "lr_end": cfg.optimizer.lr * end}}


def _in_stages(cfg: Config) -> bool:
    """Whether transformers warms up to a stable phase, and from the rate at which its decay ends."""
    scheduler = cfg.scheduler
    return scheduler.name == "wsd" and scheduler.min_lr_ratio != 1 and bool(scheduler.warmup_steps)


def _stages(scheduler: Scheduler) -> Native:
    decay = {"num_decay_steps": scheduler.decay_steps, "decay_type": _DECAYS[scheduler.decay_type]}
    return decay | ({"min_lr_ratio": scheduler.min_lr_ratio} if scheduler.min_lr_ratio else {})


def _steps(cfg: Config, topology: Topology) -> Native:
    return {"max_steps": cfg.scheduler.total_steps} if cfg.scheduler.total_steps else {}


_WITH_MUON = needs_input("muon", _named("muon"), "an argument of that optimizer")
_ENDS = "max_steps also ends the training there"
_PASS = "pass Trainer(..., optimizers=(optimizer, None)) with"
_GROUPS = "override Trainer.get_decay_parameter_names, or Trainer(..., optimizers=(optimizer, None))"

_CLIMB = "transformers warms up linearly from 0; Trainer(..., optimizers=(optimizer, scheduler))"

OPTIMIZING: Mapping[str, Rule] = {
    "optimizer.name": exact(
        "optim",
        needs_input("adam", _named("adam"), f"transformers has only AdamW; {_PASS} torch.optim.Adam"),
        needs_input("muon", _named("muon"), f"transformers 5.23 has no Muon; {_PASS} one that you build"),
        equivalent("lion", _named("lion"), "bitsandbytes' Lion: the same algorithm"),
        approximate("adamw_8bit", _named("adamw_8bit"), "Trainer keeps the state of embeddings in 32 bits"),
        to=lambda cfg, topology: {"optim": _WRITTEN[cfg.optimizer.name]} if cfg.optimizer.name in _WRITTEN else {},
    ),
    "optimizer.lr": copied("optimizer.lr", "learning_rate"),
    "optimizer.betas": exact("adam_beta1, adam_beta2", _WITH_MUON, to=_betas),
    "optimizer.eps": exact("adam_epsilon, optim_args", _WITH_MUON, to=_eps),
    **asked(Fit.NEEDS_INPUT, SCRIPT, {"optimizer.amsgrad": f"{_PASS} torch.optim.AdamW(..., amsgrad=True)"}),
    "optimizer.momentum": exact("optim_args", _WITH_MUON, to=_written_arguments),
    "optimizer.nesterov": exact("optim_args", _WITH_MUON),
    "optimizer.weight_decay": copied("optimizer.weight_decay", "weight_decay"),
    "optimizer.no_decay": row(
        Fit.NEEDS_INPUT,
        SCRIPT,
        f"Trainer exempts biases and norms, other names than these; {_GROUPS}",
        unless("what Trainer exempts", lambda cfg: cfg.optimizer.no_decay == [NO_DECAY]),
        approximate(
            "empty",
            lambda cfg: not cfg.optimizer.no_decay,
            f"Trainer exempts biases and norms from weight decay; to decay them, {_GROUPS}",
        ),
    ),
    **asked(Fit.NEEDS_INPUT, SCRIPT, {"optimizer.groups": _GROUPS}),
    "scheduler.name": exact("lr_scheduler_type", to=_schedule),
    "scheduler.warmup_steps": copied("scheduler.warmup_steps", "warmup_steps"),
    **asked(
        Fit.NEEDS_INPUT,
        SCRIPT,
        {"scheduler.warmup_type": _CLIMB, "scheduler.delay_steps": _CLIMB},
    ),
    "scheduler.warmup_start_ratio": exact(
        "lr_scheduler_kwargs",
        needs_input(
            "another than min_lr_ratio with wsd",
            lambda cfg: _in_stages(cfg) and cfg.scheduler.warmup_start_ratio != cfg.scheduler.min_lr_ratio,
            "transformers warms up from min_lr_ratio; Trainer(..., optimizers=(optimizer, scheduler))",
        ),
        needs_input(
            "not 0 otherwise", lambda cfg: not _in_stages(cfg) and bool(cfg.scheduler.warmup_start_ratio), _CLIMB
        ),
    ),
    "scheduler.total_steps": exact(
        "max_steps",
        equivalent("down to 0", lambda cfg: not cfg.scheduler.min_lr_ratio, _ENDS),
        approximate("down to min_lr_ratio", lambda cfg: True, f"{_ENDS}, where the rate stays at its lowest"),
        to=_steps,
    ),
    "scheduler.min_lr_ratio": exact("lr_scheduler_kwargs"),
    "scheduler.decay_steps": exact("lr_scheduler_kwargs"),
    "scheduler.decay_type": exact("lr_scheduler_kwargs"),
}
"""Rows of the optimizer and the schedule, which stand in TrainingArguments whatever the engine."""
