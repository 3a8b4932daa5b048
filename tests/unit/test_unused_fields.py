"""What `unishard explain` calls unused decides nothing: the schema refuses it when a file sets it, and takes it
otherwise."""

from __future__ import annotations

from typing import Any

import pytest

import unishard
from unishard.config import Config, leaves
from unishard.config.unused import why_unused

ANOTHER: dict[str, Any] = {
    "sharding.group_size": 2,
    "sharding.units": ["A"],
    "sharding.min_unit_params": 5,
    "sharding.reshard_after_forward": False,
    "precision.loss_scale": 8.0,
    "precision.initial_loss_scale": 8.0,
    "precision.loss_scale_growth_interval": 5,
    "quantization.double_quantization": True,
    "quantization.skip_modules": ["head"],
    "offload.pin_memory": False,
    "offload.nvme_path": "files",
    "optimizer.betas": [0.5, 0.6],
    "optimizer.eps": 0.5,
    "optimizer.amsgrad": True,
    "optimizer.momentum": 0.5,
    "optimizer.nesterov": True,
    "optimizer.matrices": ["proj"],
    "optimizer.adamw_lr": 0.5,
    "optimizer.adjust_lr": "match_rms_adamw",
    "optimizer.ns_steps": 3,
    "optimizer.ns_dtype": "fp32",
    "optimizer.no_decay": ["bias"],
    "scheduler.total_steps": 50,
    "scheduler.min_lr_ratio": 0.5,
    "scheduler.decay_steps": 5,
    "scheduler.decay_type": "sqrt",
    "scheduler.warmup_type": "log",
    "scheduler.warmup_start_ratio": 0.5,
    "scheduler.delay_steps": 1,
    "communication.prefetch_bucket_size": 5,
    "compile.backend": "eager",
    "checkpoint.copy_to": "s3://bucket/run",
    "checkpoint.on_existing": "new",
    "checkpoint.every_steps": 5,
    "checkpoint.every_minutes": 5.0,
    "checkpoint.on_signal": ["SIGTERM"],
    "checkpoint.keep_every": 5,
    "checkpoint.keep_best": 5,
    "logging.every_steps": 5,
    "logging.dir": "logs",
    "logging.module_steps": [3],
    "logging.project": "llama",
    "logging.run_name": "first",
    "logging.wandb_entity": "us",
    "logging.wandb_group": "sweep",
    "logging.wandb_mode": "offline",
    "profile.dir": "traces",
    "profile.ranks": "all",
    "profile.memory": True,
    "profile.shapes": True,
    "logging.mlflow_uri": "sqlite:///runs.db",
    "parallel.sequence.method": "ulysses",
    "parallel.sequence.recurrences": "heads",
    "parallel.tensor.plan": {"proj": "colwise"},
    "parallel.sequence.keys": ["input_ids"],
    "parallel.sequence.pad_to": 8,
}
"""Another value than the default, of each field that the schema refuses when it is unused."""
NOT_REFUSED = {"communication.desync_timeout", "precision.cast_inputs", "precision.keep_fp32"}
CONFIGS: tuple[dict[str, Any], ...] = (
    {},
    {"sharding": "no_shard", "optimizer": {"name": "sgd", "momentum": 0.9}},
    {"sharding": "shard_grad_op", "precision": {"compute": "fp16", "loss_scale": 8.0}, "optimizer": "adagrad"},
    {
        "sharding": "hybrid_shard",
        "precision": "fp16",
        "optimizer": {"name": "sgd", "momentum": 0.9, "weight_decay": 0.1},
    },
    {
        "scheduler": {"name": "cosine", "warmup_steps": 9, "total_steps": 100},
        "compile": "full",
        "offload": "cpu",
        "optimizer": "lion",
    },
    {"scheduler": {"name": "wsd", "total_steps": 100, "decay_steps": 20}},
    {"checkpoint": {"dir": "runs", "keep_last": 2}, "communication": {"desync_check": False}},
    {"logging": ["progress"], "profile": {"steps": [3], "dir": "traces"}},
    {"logging": {"to": ["jsonl", "wandb"], "dir": "logs"}},
    {"parallel": {"sequence": 2}},
    {"quantization": "nf4"},
    {"quantization": "int8"},
)


@pytest.mark.parametrize("document", CONFIGS, ids=str)
def test_unused_is_what_the_schema_refuses(document: dict[str, Any]) -> None:
    cfg = unishard.load(document)
    idle = {path for path, _ in leaves(Config) if why_unused(cfg, path)}
    assert idle <= set(ANOTHER) | NOT_REFUSED
    for path, value in ANOTHER.items():
        assert (path in idle) is _is_refused(cfg, f"{path}={value}"), path


def _is_refused(cfg: Config, change: str) -> bool:
    try:
        cfg.override(change.replace("'", "").replace("True", "true").replace("False", "false"))
    except unishard.ConfigError:
        return True
    return False
