"""Trains a tiny Llama for some updates and stops; the next call resumes, on another engine, strategy or number of
ranks.

    run="examples/move_between_engines.py --steps 30 --set checkpoint.dir=runs/moved --set
    checkpoint.on_existing=resume" torchrun --nproc-per-node 2 $run
    torchrun --nproc-per-node 4 $run --set backend=deepspeed --set training.gradient_accumulation_steps=1
    python $run --set backend=deepspeed --set sharding.strategy=zero1 --set training.gradient_accumulation_steps=4
    --export runs/model

Ranks x micro-batch x accumulation steps is 16 samples each time, so all three together make the same updates as one run
of 90. The script contains nothing about moving or loading: it only saves. move_between_engines.sh runs all of it and
plots the losses.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from train_llama import CONFIG, english, tiny_llama
from transformers import LlamaForCausalLM

import unishard


def main() -> None:
    args = arguments()
    cfg = unishard.load(args.config, overrides=args.set)
    here = unishard.Topology.from_environment()

    torch.manual_seed(cfg.training.seed)
    model = LlamaForCausalLM(tiny_llama())
    loader = unishard.dataloader(english(args.samples), cfg)

    run = f"{cfg.backend} {cfg.sharding.strategy}, {here.world_size} rank{'s' * (here.world_size > 1)}"
    with unishard.prepare(model, cfg) as engine:
        log = engine.resumed.state if engine.resumed else []
        start, window = len(log), []
        while len(log) < start + args.steps:
            for batch in engine.batches(loader):  # after a load: the rest of the epoch
                loss = engine(**batch).loss
                engine.backward(loss)
                window.append(loss.detach())
                if engine.step().updated:
                    log.append({"update": len(log) + 1, "loss": engine.mean(torch.stack(window).mean()), "run": run})
                    window = []
                    if len(log) == start + args.steps:
                        break
        engine.save(state=log)
        if args.export:
            engine.export(args.export)

    if here.rank == 0:
        print(f"{run}: updates {start + 1} to {len(log)}, loss {log[start]['loss']:.4f} -> {log[-1]['loss']:.4f}")
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text("".join(f"{json.dumps(line)}\n" for line in log), encoding="utf-8")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a tiny Llama on English text, from where the last checkpoint was."
    )
    parser.add_argument("--config", type=Path, default=CONFIG, help="YAML file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="override a field; checkpoint.dir is needed"
    )
    parser.add_argument("--steps", type=int, default=30, help="number of further updates")
    parser.add_argument("--samples", type=int, default=640, help="samples of an epoch, 40 updates of 16")
    parser.add_argument("--export", type=Path, help="new folder for the weights, as from_pretrained reads them")
    parser.add_argument("--out", type=Path, help="JSON lines file for the losses since update 1")
    args = parser.parse_args()
    if args.steps < 1 or args.samples < 1:
        parser.error("--steps and --samples must be at least 1")
    return args


if __name__ == "__main__":
    main()
