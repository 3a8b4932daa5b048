"""Trains a tiny Llama on English text, on the engine that the config names.

    torchrun --nproc-per-node 2 examples/train_llama.py --config configs/llama_tiny.yaml
    torchrun --nproc-per-node 2 examples/train_llama.py --config configs/llama_tiny.yaml --set backend=deepspeed
    python examples/train_llama.py                                    # one rank
    python examples/train_llama.py --set checkpoint.dir=runs/llama --set checkpoint.every_steps=20 --set
    checkpoint.on_existing=resume

The last one resumes where it was when it was stopped. Nothing is downloaded: the text is Python's own documentation,
and a token is a byte.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import unishard

CONFIG = Path(__file__).parent.parent / "configs" / "llama_tiny.yaml"


def main() -> None:
    args = arguments()
    cfg = unishard.load(args.config, overrides=args.set)
    here = unishard.Topology.from_environment()
    per_update = cfg.training.micro_batch_size * cfg.training.gradient_accumulation_steps * here.world_size

    torch.manual_seed(cfg.training.seed)
    model = LlamaForCausalLM(tiny_llama())
    loader = unishard.dataloader(english(samples=args.steps * per_update), cfg)

    log = {"backend": cfg.backend, "ranks": here.world_size, "losses": [], "grad_norms": [], "step_seconds": []}
    with unishard.prepare(model, cfg) as engine:
        finished = engine.resumed and engine.resumed.epoch  # all of the only epoch
        left = [] if finished else engine.batches(loader, progress=True)
        started, window = time.perf_counter(), []
        for batch in left:
            loss = engine(**batch).loss
            engine.backward(loss)
            step = engine.step()

            window.append(loss.detach())
            if step.updated:
                log["step_seconds"].append(time.perf_counter() - started)
                log["losses"].append(engine.mean(torch.stack(window).mean()))
                log["grad_norms"].append(step.grad_norm)
                started, window = time.perf_counter(), []
        log["peak_memory_bytes"] = on_every_rank(peak_memory())

    if not log["losses"]:
        if here.rank == 0:
            print(f"{cfg.checkpoint.dir} holds a finished run; set another checkpoint.dir to start a new one")
        return
    first, last = log["losses"][0], log["losses"][-1]
    if here.rank == 0:
        print(f"{cfg.backend}: loss {first:.4f} -> {last:.4f} after {args.steps} updates, world size {here.world_size}")
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(log, indent=1), encoding="utf-8")
    if len(log["losses"]) >= 20 and not last < first:
        raise SystemExit(f"the loss did not fall: {first:.4f} -> {last:.4f}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a tiny Llama on English text.")
    launched = (
        "UNISHARD_CONFIG" in os.environ
    )  # by `unishard launch`, whose config unishard.load() reads without a path
    parser.add_argument("--config", type=Path, default=None if launched else CONFIG, help="YAML file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="override a field, such as backend=deepspeed"
    )
    parser.add_argument("--steps", type=int, default=100, help="number of updates")
    parser.add_argument("--out", type=Path, help="JSON file for losses, gradient norms, times and memory")
    return parser.parse_args()


def tiny_llama() -> LlamaConfig:
    """A Llama with 0.7 million parameters and one token per byte."""
    return LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=128,
        use_cache=False,
    )


def english(samples: int, length: int = 128) -> list[dict[str, torch.Tensor]]:
    """Pieces of Python's documentation, cut at random places, the same ones in every run."""
    text = torch.tensor(list("\n".join(topics.values()).encode()))
    starts = torch.randint(len(text) - length, (samples,), generator=torch.Generator().manual_seed(0))
    pieces = [text[start : start + length] for start in starts.tolist()]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def peak_memory() -> int:
    """Bytes that this rank held at most: on its GPU, else in host memory (libraries included)."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def on_every_rank(value: int) -> list[int]:
    values = [0] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


if __name__ == "__main__":
    main()
