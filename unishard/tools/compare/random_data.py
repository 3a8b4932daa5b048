"""The script that is measured for `--model` without a script: trains the model on random data until it is ended."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

import unishard
from unishard.tools.plan.building import Batch, BuiltModel
from unishard.tools.plan.model import PlannedModel


def main() -> None:
    """Train. Collective."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--seq-len", type=int, default=4096)
    options = parser.parse_args()
    cfg = unishard.load()
    torch.manual_seed(cfg.training.seed)  # the same weights on each engine
    model, batch, loss = BuiltModel(options.model, PlannedModel(options.model, cfg).folder).build()
    if batch is None:
        raise unishard.ModelError(
            f"--model {options.model}: its inputs are not known; let the factory return (model, batch), where "
            "batch(micro_batch_size, seq_len) returns the keyword arguments of forward, or give a script"
        )
    with unishard.prepare(model, cfg) as engine:
        while True:
            inputs = _inputs(batch, cfg.training.micro_batch_size, options.seq_len, getattr(model, "config", None))
            out = engine(
                **{
                    name: value.to(engine.device) if isinstance(value, Tensor) else value
                    for name, value in inputs.items()
                }
            )
            engine.backward(loss(out))
            engine.step()


def _inputs(batch: Batch, micro_batch_size: int, seq_len: int, config: Any) -> dict[str, Any]:
    """What the model gets; random token ids where they are known to be some."""
    inputs = dict(batch(micro_batch_size, seq_len))
    words = getattr(config, "vocab_size", None)
    if isinstance(words, int) and inputs.keys() == {"input_ids", "labels"}:
        inputs["input_ids"] = inputs["labels"] = torch.randint(words, inputs["input_ids"].shape)
    return inputs


if __name__ == "__main__":
    main()
