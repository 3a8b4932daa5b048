"""What the ranks of `killing.py` run: `trained_for_ever.py LOG` trains for ever, and notes in a file what happens."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

import unishard


def train(log: Path) -> None:
    """Train for ever."""
    rank = unishard.Topology.from_environment().rank

    def note(event: str, step: int, **more: bool) -> None:
        if rank == 0:
            with log.open("a") as file:
                facts = {"event": event, "pid": os.getpid(), "step": step, "time": time.time(), **more}
                file.write(json.dumps(facts) + "\n")

    note("prepare", 0)
    cfg = unishard.load()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
    with unishard.prepare(model, cfg) as engine:
        step = engine.resumed.step if engine.resumed else 0
        note("resumed", step)
        engine.framework.on_save(lambda: note("saving", step, in_background=cfg.checkpoint.async_save))
        while True:
            engine.backward(engine(torch.randn(2, 64)).square().mean())
            step += 1
            engine.step()
            note("step", step)
            time.sleep(0.05)


if __name__ == "__main__":
    train(Path(sys.argv[1]))
