"""How DeepSpeed's JSON says `logging` (0.19.8, monitor/); the engine's own table has the rest."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping

from unishard.config import Config
from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.contract.rules import Fit, Rule
from unishard.formats.deepspeed.keys import MONITORS
from unishard.formats.fallbacks import row
from unishard.formats.log_tables import NOT_LOGGED, interval_row, text_rows, to_row

__all__ = ["RULES"]


def _to(cfg: Config, topology: Topology) -> Native:
    """The monitors; files go to the folder `output_path`/`job_name`."""
    parent, job = posixpath.split((cfg.logging.dir or "").rstrip("/"))
    files = {"enabled": True, "output_path": parent, "job_name": job}
    return {
        name: {"enabled": True} if name == "wandb" else files
        for name, said in MONITORS.items()
        if said in cfg.logging.to
    }


def _every(cfg: Config, topology: Topology) -> Native:
    return {"steps_per_print": cfg.logging.every_steps} if cfg.logging.to else {}


RULES: Mapping[str, Rule] = {
    "logging.to": to_row(
        "tensorboard, wandb, csv_monitor", "DeepSpeed", _to, lost={"mlflow": "DeepSpeed has no MLflow"}
    )._replace(note="the loss and the learning rate; csv_monitor for jsonl"),
    "logging.every_steps": interval_row("steps_per_print", _every, "monitors write after each update"),
    "logging.dir": row(Fit.EXACT, "output_path, job_name", "", NOT_LOGGED),
    **text_rows(
        {
            "project": {"wandb": "wandb.project"},
            "wandb_entity": {"wandb": "wandb.team"},
            "wandb_group": {"wandb": "wandb.group"},
        }
    ),
}
"""How each field is said."""
