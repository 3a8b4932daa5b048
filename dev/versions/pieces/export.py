"""Exports a trained model and reads it back with transformers, bit by bit. Run in the environment:
`export.py OUT.json`."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import unishard
from unishard.testing import run_ranks
from unishard.testing.models import MODELS, batch_of, llama

RUNS = (
    ("fsdp", "full_shard", "fp32"),
    ("fsdp", "no_shard", "bf16"),
    ("deepspeed", "full_shard", "fp32"),
    ("deepspeed", "shard_grad_op", "bf16"),
)


def main(out: Path) -> None:
    found = {}
    for backend, strategy, precision in RUNS:
        with tempfile.TemporaryDirectory(prefix="export-") as folder:
            found[f"{backend} {strategy} {precision}"] = {"wrong": wrong(backend, strategy, precision, folder)}
    out.write_text(json.dumps(found), encoding="utf-8")


def wrong(*run: str) -> str:
    try:
        differing = run_ranks(2, exported, *run, timeout=240)[0]
    except AssertionError as failure:  # a rank failed, died or hung
        return str(failure).strip().splitlines()[0][:300]
    return f"other weights than those that were trained: {', '.join(differing)}" if differing else ""


def exported(backend: str, strategy: str, precision: str, folder: str) -> list[str]:
    """Names of the parameters that are not in the folder as the engine holds them, after one update."""
    from transformers import LlamaForCausalLM

    sections: dict[str, Any] = {"sharding": strategy, "precision": precision, "optimizer": {"lr": 1e-2}}
    model = llama()
    names = [name for name, _ in model.named_parameters()]
    with unishard.prepare(model, unishard.Config.model_validate({"backend": backend, **sections})) as engine:
        engine.backward(engine(**batch_of(MODELS["llama"], 0, 2)).loss)
        engine.step()
        engine.export(folder, dtype="fp32")
        held = {name: engine.weights.read(name).cpu() for name in names}
    read = dict(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
    return [name for name in names if not torch.equal(held[name], read[name].detach())]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
