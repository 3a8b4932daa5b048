"""A training of Ray Train's TorchTrainer on unishard, run as a program of its own: the driver of a local Ray."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import launched_training
import torch

import unishard
from unishard.integrations.ray import report, resume
from unishard.testing.models import MODELS, batch


def train(asked: dict[str, Any]) -> None:
    """What each worker runs: a report with a checkpoint after every second update."""
    cfg = launched_training.config(asked["config"])
    everything, samples = batch("mlp", 0, launched_training.SAMPLES), launched_training.SAMPLES
    data = [{name: value[at] for name, value in everything.items()} for at in range(samples)]
    deaths = Path(asked["out"]).with_suffix(".deaths")
    with unishard.prepare(MODELS["mlp"].build(), cfg) as engine:
        resumed = resume(engine)
        step, window = resumed.step if resumed else 0, []
        for micro_batch in engine.batches(unishard.dataloader(data, cfg)):
            loss = engine(**micro_batch).loss
            engine.backward(loss)
            window.append(loss.detach())
            if not engine.step().updated:
                continue
            step += 1
            value, window = engine.mean(torch.stack(window).mean()), []
            if engine.is_main:
                with Path(asked["out"]).open("a") as file:
                    file.write(json.dumps([engine.world_size, step, value]) + "\n")
            report(engine, {"step": step, "loss": value}, save=step % 2 == 0, state={"step": step})
            if engine.rank == 1 and (step, deaths.exists()) in ((5, False), (7, True)):
                deaths.touch()
                os._exit(1)


def main() -> None:
    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchTrainer

    out, storage, workers, failures, config = sys.argv[1:]
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
    trainer = TorchTrainer(
        train,
        train_loop_config={"out": out, "config": json.loads(config)},
        scaling_config=ScalingConfig(num_workers=int(workers), use_gpu=False),
        run_config=RunConfig(
            name="run",
            storage_path=storage,
            failure_config=FailureConfig(max_failures=int(failures)),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    try:
        result = trainer.fit()
    except TrainingFailedError as error:
        raise SystemExit(f"failed: {type(error).__name__}") from error
    assert result.metrics["step"] == 8
    assert Path(result.checkpoint.path).parent.name == "checkpoints"


if __name__ == "__main__":
    main()
