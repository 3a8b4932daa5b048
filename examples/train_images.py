"""Trains a small convolutional network on images, in plain torch, with mixup, label smoothing, averaged weights (EMA),
early stopping and the best checkpoint.

    unishard launch examples/train_images.yaml --processes-per-node 2 examples/train_images.py
    unishard launch examples/train_images.yaml --set backend=deepspeed --processes-per-node 2 examples/train_images.py

Nothing is downloaded: an image is noise with a bright stripe, whose direction is its class.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.distributions import Beta
from torch.nn import functional

import unishard

CLASSES = 4


def main() -> None:
    args = arguments()
    cfg = unishard.load()  # the file and the overrides of `unishard launch`
    training_set, held_out = images(512, seed=0), images(128, seed=1)
    torch.manual_seed(cfg.training.seed)
    with unishard.prepare(network(), cfg) as engine:
        average = engine.weights.average(args.decay)
        best, waited = 0.0, 0
        for epoch in range(args.epochs):
            for step, batch in enumerate(engine.batches(unishard.dataloader(training_set, cfg))):
                pixels, targets = mixed(batch["pixels"], batch["label"], args.mixup, seed=(epoch, step, engine.rank))
                engine.backward(functional.cross_entropy(engine(pixels), targets, label_smoothing=args.smoothing))
                engine.step()
            with average.weights():
                accuracy = evaluate(engine, cfg, held_out)
            engine.print(f"epoch {epoch}: accuracy {accuracy:.4f}")
            engine.save(metric=accuracy)  # checkpoint.best is max, and keep_best keeps the best one
            best, waited = (accuracy, 0) if accuracy > best else (best, waited + 1)
            if waited == args.patience:
                break
        engine.load("best")
        with average.weights():
            engine.print(f"best: accuracy {evaluate(engine, cfg, held_out):.4f}")
            engine.export(args.export, overwrite=True)


def mixed(pixels: Tensor, labels: Tensor, alpha: float, seed: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Mixup: each image and its class, as probabilities, blended with another one of the batch."""
    targets = functional.one_hot(labels, CLASSES).float()
    if not alpha:
        return pixels, targets
    with torch.random.fork_rng([]):
        torch.manual_seed(hash(seed) % 2**32)
        share = Beta(alpha, alpha).sample().item()
        other = torch.randperm(len(labels)).to(labels.device)
    return share * pixels + (1 - share) * pixels[other], share * targets + (1 - share) * targets[other]


def evaluate(engine: unishard.Engine, cfg: unishard.Config, held_out: list[dict[str, Tensor]]) -> float:
    """The share of held-out images whose class is right, over all ranks."""
    engine.eval()
    right = [
        (engine(batch["pixels"]).argmax(-1) == batch["label"]).float().mean()
        for batch in engine.batches(unishard.dataloader(held_out, cfg, shuffle=False, drop_last=True))
    ]
    engine.train()
    return engine.mean(torch.stack(right).mean())


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.GELU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.GroupNorm(4, 32),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, CLASSES),
    )


def images(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Noise with a stripe: in a row, in a column, or along one of the diagonals."""
    made = torch.Generator().manual_seed(seed)
    pixels, labels = torch.randn(count, 1, 12, 12, generator=made), torch.arange(count) % CLASSES
    places = torch.randint(0, 12, (count,), generator=made).tolist()
    along = torch.arange(12)
    for image, label, place in zip(pixels, labels.tolist(), places, strict=True):
        across = [torch.full((12,), place), (along + place) % 12, (place - along) % 12]
        rows, columns = [(across[0], along), (along, across[0]), (along, across[1]), (along, across[2])][label]
        image[0, rows, columns] += 2
    return [{"pixels": image, "label": label} for image, label in zip(pixels, labels, strict=True)]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network on images.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--mixup", type=float, default=0.2, metavar="ALPHA", help="0 for none")
    parser.add_argument("--smoothing", type=float, default=0.1, help="of labels")
    parser.add_argument("--decay", type=float, default=0.9, help="of the average of the weights")
    parser.add_argument("--patience", type=int, default=3, help="epochs without a better accuracy")
    parser.add_argument("--export", default="runs/images/model", metavar="FOLDER", help="for the averaged weights")
    return parser.parse_args()


if __name__ == "__main__":
    main()
