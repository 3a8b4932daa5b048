"""A training script as a user writes it, started by `unishard launch`. In its first life a rank can end where it is
told to."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import unishard
from unishard.testing.models import MODELS, batch

SAMPLES = 64
GLOBAL_BATCH = 8


def config(source: Any = None, *overrides: str) -> unishard.Config:
    """The config with as much accumulation as gives the same batches on any number of ranks."""
    world = unishard.Topology.from_environment().world_size
    changes = [
        "training.micro_batch_size=2",
        f"training.gradient_accumulation_steps={GLOBAL_BATCH // 2 // world}",
        *overrides,
    ]
    return unishard.load(overrides=changes) if source is None else unishard.load(source, changes)


def train(cfg: unishard.Config, each: Any = lambda step, loss: None, samples: int = SAMPLES) -> dict[int, float]:
    """The loss of each update."""
    everything = batch("mlp", 0, samples)
    data = [{name: value[at] for name, value in everything.items()} for at in range(samples)]
    with unishard.prepare(MODELS["mlp"].build(), cfg) as engine:
        step, window, losses = engine.resumed.step if engine.resumed else 0, [], {}
        for micro_batch in engine.batches(unishard.dataloader(data, cfg)):
            loss = engine(**micro_batch).loss
            engine.backward(loss)
            window.append(loss.detach())
            if engine.step().updated:
                step += 1
                losses[step] = engine.mean(torch.stack(window).mean())
                window = []
                each(step, losses[step])
    return losses


def whole_run(source: Any, *overrides: str) -> dict[int, float]:
    """The losses of a run that nothing ends."""
    return train(config(source, *overrides))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--end", default="", help="RANK:STEP:HOW")
    args = parser.parse_args()
    here = unishard.Topology.from_environment()
    life = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    rank, step_of_end, how = args.end.split(":") if args.end else ("-1", "0", "")

    def each(step: int, loss: float) -> None:
        if here.rank == 0:
            with args.out.open("a") as file:
                file.write(json.dumps([life, here.world_size, step, loss]) + "\n")
        if life == 0 and here.rank == int(rank) and step == int(step_of_end):
            end(how)
        if how == "slow":
            time.sleep(0.2)

    cfg = config()
    train(cfg, each)
    if here.rank == 0:
        sys.stderr.write(f"finished with seed {cfg.training.seed}\n")


def end(how: str) -> None:
    match how:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise ValueError("a broken sample")
        case "exit":
            raise SystemExit(7)


if __name__ == "__main__":
    main()
