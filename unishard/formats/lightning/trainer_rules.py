"""How Lightning's Trainer, and the script around it, say what is no strategy's (2.6.6)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from unishard.config import Config
from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.contract.field_rows import exact, row, when_default
from unishard.contract.rules import NO_KEY, Fit, Rule, approximate, is_, needs_input, unless

MODULE = "your LightningModule"
_OPTIMIZERS = {
    "adamw": "torch.optim.AdamW",
    "adam": "torch.optim.Adam",
    "sgd": "torch.optim.SGD",
    "adagrad": "torch.optim.Adagrad",
    "lion": "lion_pytorch.Lion",
}
_BELONGS: Mapping[str, tuple[str, ...]] = {
    "betas": ("adamw", "adam", "lion"),
    "eps": ("adamw", "adam", "adagrad"),
    "amsgrad": ("adamw", "adam"),
    "momentum": ("sgd",),
    "nesterov": ("sgd",),
}


def trainer(**arguments: Any) -> Native:
    """Arguments of the Trainer."""
    return {"trainer": arguments}


def _clips(cfg: Config) -> Native:
    largest = cfg.training.gradient_clipping
    return trainer(gradient_clip_val=largest, gradient_clip_algorithm="norm") if largest else {}


def _accumulates(cfg: Config) -> bool:
    return cfg.training.gradient_accumulation_steps > 1


def is_scaled(cfg: Config) -> bool:
    """Whether the loss is scaled."""
    return cfg.precision.compute == "fp16" and not cfg.precision.pure


UNCLIPPED = when_default("training.gradient_clipping")
_NOTHING = "there is nothing to decide"
TRAINING: Mapping[str, Rule] = {
    "training.gradient_accumulation_steps": exact(
        "accumulate_grad_batches",
        to=lambda cfg, topology: trainer(accumulate_grad_batches=cfg.training.gradient_accumulation_steps),
    ),
    "training.gradient_clipping": exact("gradient_clip_val", UNCLIPPED, to=lambda cfg, topology: _clips(cfg)),
    "training.nonfinite": row(
        Fit.APPROXIMATE,
        NO_KEY,
        "Lightning steps with NaN gradients too; check them in on_before_optimizer_step",
        unless("ignore", lambda cfg: cfg.training.nonfinite == "ignore", "is what Lightning does"),
        unless(
            "skip in fp16",
            lambda cfg: cfg.training.nonfinite == "skip" and is_scaled(cfg),
            "the gradient scaler skips such updates",
        ),
    ),
    "training.last_window": row(
        Fit.EQUIVALENT,
        "accumulate_grad_batches",
        "Lightning divides a partial last window by the full window",
        unless("no accumulation", lambda cfg: not _accumulates(cfg), "there is no window to fill"),
        needs_input(
            *is_("training.last_window", "drop"),
            "make the DataLoader end with a full window: Lightning also steps with a partial one",
        ),
    ),
    "training.seed": Rule(
        Fit.EXACT,
        "seed_everything",
        "every rank draws the same random numbers in Lightning",
        lambda cfg, topology: {"seed_everything": cfg.training.seed},
    ),
}
"""The loop."""


def _name(cfg: Config, topology: Topology) -> Native:
    return {"optimizer": {"class_path": _OPTIMIZERS[cfg.optimizer.name]}}


def _argument(name: str) -> Rule:
    def to(cfg: Config, topology: Topology) -> Native:
        if cfg.optimizer.name not in _BELONGS.get(name, (cfg.optimizer.name,)):
            return {}
        value = getattr(cfg.optimizer, name)
        return {"optimizer": {"init_args": {name: list(value) if isinstance(value, tuple) else value}}}

    return exact(f"configure_optimizers: {name}", to=to)


def _schedule(what: str) -> Rule:
    constant = unless(
        "a constant rate", lambda cfg: cfg.scheduler.name == "constant" and not cfg.scheduler.warmup_steps, _NOTHING
    )
    return row(Fit.NEEDS_INPUT, MODULE, f"return {what} from configure_optimizers, with interval: step", constant)


_SCHEDULE = "a scheduler such as transformers.get_scheduler makes"
_SPLIT = "give the optimizer groups of parameters in configure_optimizers"
_NONE = unless("empty", lambda cfg: not cfg.optimizer.no_decay, _NOTHING)
RECIPE: Mapping[str, Rule] = {
    "optimizer.name": exact("configure_optimizers", to=_name),
    **{
        f"optimizer.{name}": _argument(name)
        for name in ("lr", "betas", "eps", "amsgrad", "momentum", "nesterov", "weight_decay")
    },
    "optimizer.no_decay": row(Fit.NEEDS_INPUT, MODULE, f"{_SPLIT}, these without weight decay", _NONE),
    "optimizer.groups": row(
        Fit.NEEDS_INPUT, MODULE, _SPLIT, unless("empty", lambda cfg: not cfg.optimizer.groups, _NOTHING)
    ),
    "scheduler.name": _schedule(_SCHEDULE),
    "scheduler.warmup_steps": _schedule(f"{_SCHEDULE} (num_warmup_steps)"),
    "scheduler.warmup_type": _schedule(f"{_SCHEDULE} with this warmup shape"),
    "scheduler.warmup_start_ratio": _schedule(f"{_SCHEDULE} that starts at this fraction of the rate"),
    "scheduler.delay_steps": _schedule(f"{_SCHEDULE}, that waits for these updates"),
    "scheduler.total_steps": _schedule(f"{_SCHEDULE} (num_training_steps)"),
    "scheduler.min_lr_ratio": row(
        Fit.NEEDS_INPUT,
        MODULE,
        f"return {_SCHEDULE} from configure_optimizers, which ends at this fraction of the rate",
        unless("0", lambda cfg: not cfg.scheduler.min_lr_ratio, _NOTHING),
    ),
}
"""The optimizer and the schedule, which Lightning asks the LightningModule for."""

_DEVICES = "CUDA_VISIBLE_DEVICES"
_INDEXES = re.compile(r"\d+(,\d+)*")


def _named(cfg: Config) -> list[int] | None:
    """The GPUs that each host has ranks on, where each rank has one."""
    text = str(cfg.launch.environment.get(_DEVICES, ""))
    found = [int(index) for index in text.split(",")] if _INDEXES.fullmatch(text) else []
    return found if found and len(found) == cfg.launch.processes_per_node else None


def _devices(cfg: Config, topology: Topology) -> Native:
    each = topology.local_world_size if topology.world_size > 1 else cfg.launch.processes_per_node
    named = _named(cfg)
    return {} if each is None else trainer(accelerator="gpu", devices=named if named and len(named) == each else each)


def _nodes(cfg: Config, topology: Topology) -> Native:
    """Those that were asked for count."""
    asked = topology.world_size // topology.local_world_size
    return (
        trainer(num_nodes=asked if topology.world_size > 1 else cfg.launch.max_nodes)
        if asked > 1 or cfg.launch.max_nodes > 1
        else {}
    )


def _around(name: str, note: str) -> Rule:
    """A row for what is said around the script."""
    return row(Fit.IGNORED, NO_KEY, note, when_default(f"launch.{name}"))


LAUNCHING: Mapping[str, Rule] = {
    "launch.nodes": exact(
        "num_nodes",
        approximate(
            "a range",
            lambda cfg: cfg.launch.min_nodes != cfg.launch.max_nodes,
            "a fixed number: the run does not go on with fewer",
        ),
        to=_nodes,
    ),
    "launch.processes_per_node": exact("devices", to=_devices),
    "launch.endpoint": _around(
        "endpoint", "set MASTER_ADDR and MASTER_PORT, which Lightning's launcher reads; torchrun sets them"
    ),
    "launch.max_restarts": _around(
        "max_restarts", "Lightning's launcher has no restarts; start the script with torchrun --max-restarts"
    ),
    "launch.environment": exact(
        "devices",
        needs_input(
            "other variables",
            lambda cfg: (
                bool(cfg.launch.environment.keys() - {_DEVICES})
                or (_DEVICES in cfg.launch.environment and _named(cfg) is None)
            ),
            f"export them before the launch; only {_DEVICES} has an argument",
        ),
    ),
}
"""Rows by field, the same for every strategy."""
