"""Runs a script on the workers of Ray Train's TorchTrainer, which takes the place of torchrun."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unishard.config import Config
from unishard.errors import BackendError, ConfigError, Problem
from unishard.tools.launch.command import Script, environment_of


def plan(cfg: Config, script: Script, handed_over: Mapping[str, str]) -> dict[str, Any]:
    """What is passed to Ray, as plain values.

    Args:
        cfg: The config.
        script: What each worker runs.
        handed_over: Environment variables that tell the script its config.

    Raises:
        ConfigError: The number of workers is not known.
    """
    launch = cfg.launch
    if launch.processes_per_node is None:
        raise ConfigError(
            [Problem("launch.processes_per_node", "is needed to ask Ray for as many workers; write a number")]
        )
    least, most = (nodes * launch.processes_per_node for nodes in (launch.min_nodes, launch.max_nodes))
    return {
        "address": launch.endpoint,
        "num_workers": most if least == most else (least, most),
        "max_failures": launch.max_restarts,
        "environment": {**handed_over, **environment_of(cfg)},
        "script": script.name if script.module else str(Path(script.name).resolve()),
        "arguments": list(script.arguments),
        "module": script.module,
        "folder": str(Path.cwd()),
    }


def run(asked: Mapping[str, Any]) -> int:
    """Run a plan on the Ray cluster at its address, on a running one of this host, or on a new one of this host; wait
    for its end.

    Returns:
        The exit status: 0, or 1 if a worker has failed more often than `launch.max_restarts`.

    Raises:
        BackendError: Ray Train is not installed.
    """
    try:
        import ray
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer
    except ImportError as error:
        raise BackendError(f"--ray needs Ray Train ({error}); pip install 'unishard[ray]'") from None
    if not ray.is_initialized():
        ray.init(address=asked["address"])
    trainer = TorchTrainer(
        _work,
        train_loop_config=dict(asked),
        scaling_config=ScalingConfig(
            num_workers=asked["num_workers"], use_gpu=ray.cluster_resources().get("GPU", 0) > 0
        ),
        run_config=RunConfig(
            failure_config=FailureConfig(max_failures=asked["max_failures"]),
            worker_runtime_env={"env_vars": dict(asked["environment"])},
        ),
    )
    try:
        trainer.fit()
    except ray.train.TrainingFailedError as error:
        sys.stderr.write(f"unishard launch: {error}\n")
        return 1
    return 0


def _work(asked: Mapping[str, Any]) -> None:
    """What each worker does: the script as its main program."""
    os.chdir(asked["folder"])
    sys.argv = [asked["script"], *asked["arguments"]]
    sys.path.insert(0, asked["folder"] if asked["module"] else str(Path(asked["script"]).parent))
    try:
        if asked["module"]:
            runpy.run_module(asked["script"], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(asked["script"], run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise RuntimeError(f"{asked['script']} has ended with exit code {end.code}") from end
