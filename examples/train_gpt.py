"""Trains a small GPT on text, in plain torch: a template for a real training, with resuming, logs, evaluation and a
sample at the end.

    python examples/train_gpt.py                                                  # one rank
    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py                # two, on this host
    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --set backend=deepspeed
    sbatch examples/train_gpt.sbatch                                              # Slurm
    kubectl create -f examples/train_gpt.k8s.yaml                                 # Kubernetes, Kubeflow's operator

Every start resumes where the last one stopped. Nothing is downloaded: the text is Python's own documentation, or a file
that `--text` names, and a token is a byte.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional

import unishard


def main() -> None:
    args = arguments()
    cfg = unishard.load(args.config, overrides=args.set)
    training_set, held_out = samples(args.text, args.length)

    torch.manual_seed(cfg.training.seed)
    model = GPT(length=args.length, width=args.width, layers=args.layers, heads=args.heads)
    with unishard.prepare(model, cfg) as engine:
        train(engine, cfg, training_set, held_out, evaluate_every=args.evaluate_every)
        loss = evaluate(engine, cfg, held_out)
        engine.log(**{"eval/loss": loss})
        engine.save(metric=loss)
        prompt = torch.tensor([list(b"The ")], device=engine.device)
        engine.eval()
        text = bytes(engine.generate(prompt, count=args.sample)[0].tolist()).decode(errors="replace")
        engine.print(f"held-out loss {loss:.4f}, backend {cfg.backend}, world size {engine.world_size}\n{text}")


def train(
    engine: unishard.Engine, cfg: unishard.Config, training_set: list, held_out: list, *, evaluate_every: int
) -> None:
    """Train until `scheduler.total_steps`, over as many epochs as that takes."""
    done = engine.resumed.step if engine.resumed else 0
    loader = unishard.dataloader(training_set, cfg)
    while done < cfg.scheduler.total_steps:
        for batch in engine.batches(loader):
            loss = engine(**batch)
            engine.backward(loss)
            step = engine.step()  # logs and saves too, as often as the config says
            if not (step.updated or step.skipped):
                continue  # inside an accumulation window
            done += 1
            if done % evaluate_every == 0 and done < cfg.scheduler.total_steps:
                engine.log(**{"eval/loss": evaluate(engine, cfg, held_out)})
            if done == cfg.scheduler.total_steps:
                break


def evaluate(engine: unishard.Engine, cfg: unishard.Config, held_out: list) -> float:
    """Mean loss over the held-out text and all ranks."""
    engine.eval()
    losses = [
        engine(**batch) for batch in engine.batches(unishard.dataloader(held_out, cfg, shuffle=False, drop_last=True))
    ]
    engine.train()
    return engine.mean(torch.stack(losses).mean())


class Block(nn.Module):
    """Causal self-attention and an MLP, each after a norm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Of hidden states in the shape (samples, tokens, width)."""
        batch, length, width = x.shape
        parts = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*parts.unbind(), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """A decoder over bytes."""

    def __init__(self, *, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.length = length
        self.config = SimpleNamespace(
            num_hidden_layers=layers, hidden_size=width
        )  # by which the engine counts attention in its MFU
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.apply(initialize)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """The mean loss if there are labels, else the logits."""
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return logits if labels is None else functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def generate(self, tokens: Tensor, count: int) -> Tensor:
        """Append the likeliest bytes, one at a time; the same number of forwards on every rank."""
        for _ in range(count):
            logits = self(tokens[:, -self.length :])
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
        return tokens


def initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)


def samples(path: Path | None, length: int) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Pieces of the text and, for each byte, the next one: nine tenths to train on, and the rest."""
    text = "\n".join(topics.values()).encode() if path is None else path.read_bytes()
    codes = torch.tensor(list(text))
    pieces = [codes[start : start + length + 1] for start in range(0, len(codes) - length, length)]
    if len(pieces) < 10:
        raise SystemExit(
            f"{path} has {len(text)} bytes, too few for pieces of {length}; pass a longer text or a smaller --length"
        )
    made = [{"input_ids": piece[:-1], "labels": piece[1:]} for piece in pieces]
    cut = len(made) - max(1, len(made) // 10)
    return made[:cut], made[cut:]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT on text.")
    launched = "UNISHARD_CONFIG" in os.environ  # by `unishard launch`, whose config unishard.load() reads
    beside = None if launched else Path(__file__).with_suffix(".yaml")
    parser.add_argument("--config", type=Path, default=beside, help="YAML file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="override a field, such as backend=deepspeed"
    )
    parser.add_argument("--text", type=Path, help="file to train on; default: Python's documentation")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--width", type=int, default=128, help="size of the hidden states")
    parser.add_argument("--layers", type=int, default=4, help="number of blocks")
    parser.add_argument("--heads", type=int, default=4, help="attention heads of a block")
    parser.add_argument(
        "--evaluate-every", type=int, default=100, metavar="N", help="optimizer steps between evaluations"
    )
    parser.add_argument("--sample", type=int, default=100, metavar="N", help="bytes to generate at the end")
    return parser.parse_args()


if __name__ == "__main__":
    main()
