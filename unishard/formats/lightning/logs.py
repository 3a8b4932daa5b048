"""What Lightning's loggers and profilers say, and how it says `logging` (2.6.6, pytorch/loggers and
pytorch/profilers).
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from unishard.config import Config
from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.contract.entries import Given, Key, Meaning
from unishard.contract.rules import NO_KEY, Fit, Rule
from unishard.contract.templates import placeholders_in
from unishard.formats.fallbacks import row
from unishard.formats.lightning.shape import Built, built, short
from unishard.formats.lightning.trainer_rules import trainer
from unishard.formats.log_tables import NOT_LOGGED, NOT_PROFILED, destinations, interval, interval_row, left, to_row

__all__ = ["LOGGED", "LOGS"]

_HOME = "lightning.pytorch.loggers"
_ROOT = "lightning_logs"
"""Where loggers write if it is not set."""
_OFF: tuple[Any, ...] = (None, False, "", [], "false", "False")
_CYCLE = [3, 4, 5]
"""The steps that PyTorchProfiler records first: it waits for one, warms up for one, and records three, again and
again."""


class _Logger(NamedTuple):
    """A class of Lightning's: its destination here, and fields by argument."""

    name: str
    fields: Mapping[str, str]


_CLASSES: Mapping[str, _Logger] = {
    "TensorBoardLogger": _Logger("tensorboard", {}),
    "CSVLogger": _Logger("jsonl", {}),
    "WandbLogger": _Logger(
        "wandb", {"project": "project", "name": "run_name", "entity": "wandb_entity", "group": "wandb_group"}
    ),
    "MLFlowLogger": _Logger(
        "mlflow", {"experiment_name": "project", "run_name": "run_name", "tracking_uri": "mlflow_uri"}
    ),
}
_NESTED = ("TensorBoardLogger", "CSVLogger")
"""Classes that write below `save_dir`/`name`."""


def _items(value: Any, given: Given) -> list[tuple[str, Built]]:
    """The loggers that a value builds, by the name of their class."""
    if value is True or value in ("true", "True"):
        root = given.get("default_root_dir")
        return [
            (
                "TensorBoardLogger",
                Built("TensorBoardLogger", "", {"save_dir": root} if isinstance(root, str) else {}, {}),
            )
        ]
    items = value if isinstance(value, list | tuple) else [value]
    return [(short(one.path), one) for item in items if item not in _OFF and (one := built(item))]


def _named(given: Given) -> list[str]:
    """Where the loggers write, in our words."""
    value = given.get("logger") if "logger" in given else given.get("loggers")
    return list(dict.fromkeys(_CLASSES[name].name for name, _ in _items(value, given) if name in _CLASSES))


def _shows(given: Given) -> bool:
    return given.get("enable_progress_bar") not in (False, "false", "False")


def _folder(items: list[tuple[str, Built]]) -> str:
    """Of the first logger that writes files."""
    for name, found in items:
        save = str(found.arguments.get("save_dir") or found.arguments.get("dir") or "")
        if name in _NESTED:
            return posixpath.join(save, str(found.arguments.get("name", _ROOT) or "")).rstrip("/") or "."
        if save and name in _CLASSES:
            return save
    return _ROOT


def _logger(value: Any, given: Given) -> Meaning:
    if value in _OFF:
        return left("is off")
    items = _items(value, given)
    named = _named(given)
    others = [name for name, _ in items if name not in _CLASSES]
    said = destinations(
        named, _folder(items), progress=_shows(given), note=_CSV if "jsonl" in named else "", others=others
    )
    if not said.fields:
        return said
    fields = dict(said.fields)
    for name, found in items:
        fields = {**_texts(name, found), **fields}
    return said._replace(fields=fields)


_CSV = "JSON lines here, a table with commas there; the same values under other names"


def _texts(name: str, found: Built) -> dict[str, Any]:
    known = _CLASSES.get(name)
    if known is None:
        return {}
    values = {f"logging.{field}": found.arguments.get(argument) for argument, field in known.fields.items()}
    fields = {
        field: value
        for field, value in values.items()
        if isinstance(value, str) and value.strip() and not placeholders_in(value)
    }
    if known.name == "wandb" and found.arguments.get("offline") in (True, "true"):
        fields["logging.wandb_mode"] = "offline"
    if (
        known.name == "wandb"
        and isinstance(found.arguments.get("save_dir"), str)
        and not placeholders_in(found.arguments["save_dir"])
    ):
        fields["logging.dir"] = found.arguments["save_dir"]
    return fields


def _steps(value: Any, given: Given) -> Meaning:
    return left() if value in _OFF or placeholders_in(value) else interval(value, _named(given), progress=_shows(given))


def _profiler(value: Any, given: Given) -> Meaning:
    found = built(value)
    name = short(found.path).lower() if found else str(value).lower()
    if value in _OFF:
        return left("is off")
    if name not in ("pytorch", "pytorchprofiler") or found is None or "schedule" in found.arguments:
        return left("times of hooks, or a schedule in Python; profile.steps traces chosen steps")
    folder = found.arguments.get("dirpath")
    fields: dict[str, Any] = {"profile.steps": _CYCLE}
    fields["profile.dir"] = folder if isinstance(folder, str) and not placeholders_in(folder) else _ROOT
    fields |= {
        f"profile.{field}": True
        for argument, field in _ARGUMENTS.items()
        if found.arguments.get(argument) in (True, "true")
    }
    return Meaning(
        Fit.APPROXIMATE,
        "Lightning counts micro-batches, and goes on with every fifth; set profile.steps",
        fields,
        kept=True,
    )


_ARGUMENTS = {"record_shapes": "shapes", "profile_memory": "memory"}

_WORDS = "logging.to: tensorboard, jsonl, wandb, mlflow; logging.dir and the names of the run"
LOGGED: Mapping[str, Key] = {
    **dict.fromkeys(("logger", "loggers"), Key(_logger, "", Fit.EQUIVALENT, _WORDS)),
    "log_every_n_steps": Key(_steps, "", Fit.EQUIVALENT, "logging.every_steps"),
    "enable_progress_bar": Key(
        lambda value, given: left("counts in logger"), "", Fit.IGNORED, "counts in logger and log_every_n_steps"
    ),
    "profiler": Key(
        _profiler, "", Fit.APPROXIMATE, "pytorch: profile.steps [3, 4, 5], of which Lightning repeats every cycle"
    ),
}
"""What each argument says."""


def _built(class_: str, /, **arguments: Any) -> Native:
    said = {key: value for key, value in arguments.items() if value is not None}
    return {"class_path": f"{_HOME}.{class_}", **({"init_args": said} if said else {})}


_MAKES: Mapping[str, Callable[[Config], Native]] = {
    "tensorboard": lambda cfg: _built("TensorBoardLogger", save_dir=cfg.logging.dir, name="", version=""),
    "jsonl": lambda cfg: _built("CSVLogger", save_dir=cfg.logging.dir, name="", version=""),
    "wandb": lambda cfg: _built(
        "WandbLogger",
        project=cfg.logging.project,
        name=cfg.logging.run_name,
        save_dir=cfg.logging.dir,
        entity=cfg.logging.wandb_entity,
        group=cfg.logging.wandb_group,
        offline=True if cfg.logging.wandb_mode == "offline" else None,
    ),
    "mlflow": lambda cfg: _built(
        "MLFlowLogger",
        experiment_name=cfg.logging.project,
        run_name=cfg.logging.run_name,
        tracking_uri=cfg.logging.mlflow_uri or (f"sqlite:///{cfg.logging.dir}/mlflow.db" if cfg.logging.dir else None),
    ),
}


def _to(cfg: Config, topology: Topology) -> Native:
    made = [_MAKES[name](cfg) for name in cfg.logging.to if name in _MAKES]
    if not cfg.logging.to:
        return {}
    return trainer(logger=made or False, enable_progress_bar="progress" in cfg.logging.to)


def _every(cfg: Config, topology: Topology) -> Native:
    return trainer(log_every_n_steps=cfg.logging.every_steps) if cfg.logging.to else {}


def _argument(key: str) -> Rule:
    return row(Fit.EXACT, key, "", NOT_LOGGED)


_TRACES = "traces only; pass PyTorchProfiler(dirpath=..., schedule=torch.profiler.schedule(...)) as profiler"

LOGS: Mapping[str, Rule] = {
    "logging.to": to_row("logger, enable_progress_bar", "your LightningModule", _to, lost={})._replace(
        note="what your LightningModule logs; CSVLogger for jsonl"
    ),
    "logging.every_steps": interval_row("log_every_n_steps", _every, "the last value instead of the mean"),
    "logging.dir": _argument("save_dir of the logger"),
    "logging.project": _argument("project of WandbLogger, experiment_name of MLFlowLogger"),
    "logging.run_name": _argument("name of WandbLogger, run_name of MLFlowLogger"),
    "logging.wandb_entity": _argument("entity of WandbLogger"),
    "logging.wandb_group": _argument("group of WandbLogger"),
    "logging.wandb_mode": _argument("offline of WandbLogger"),
    "logging.mlflow_uri": _argument("tracking_uri of MLFlowLogger"),
    **{
        f"profile.{name}": row(Fit.IGNORED, NO_KEY, _TRACES, NOT_PROFILED)
        for name in ("steps", "dir", "ranks", "memory", "shapes")
    },
}
"""How each field is said."""
