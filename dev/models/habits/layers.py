"""Recurrent layers, convolutions, embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from dev.models.case import Batch, Kind, drawn, seeded
from dev.models.habits.blocks import CLASSES, WIDTH, WORDS, add, features, own_cross_entropy, stack, words

__all__ = ["KIND", "Embedded"]

KIND = Kind("Own modules: layers")


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH // 2, 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


add(KIND, "LSTM in two directions", _Recurrent)


class _Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.gru = nn.GRU(WIDTH, WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.embedding(x), [6, 4], batch_first=True)
        return self.gru(packed)[1].transpose(0, 1)


add(KIND, "GRU over packed sequences", _Packed, words())


class _Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.GRUCell(WIDTH, WIDTH), nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state, memory, outputs = None, None, []
        for step in x.unbind(1):
            state = self.first(step, state)
            memory = self.second(state, memory)
            outputs.append(memory[0])
        return torch.stack(outputs, 1)


add(KIND, "cells in a loop over time", _Cells)


class _Count(nn.Module):
    """As a metric of torchmetrics, whose hash is that of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.number, self.total = 0, torch.zeros(())

    def __hash__(self) -> int:
        return hash((type(self), self.number))

    def forward(self, x: Tensor) -> None:
        self.number += 1
        self.total = self.total + x.mean()


class _Measured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mean = nn.Linear(WIDTH, WIDTH), _Count()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layer(x))
        self.mean(y.detach())
        return y


add(KIND, "a metric of torchmetrics in the model", _Measured)


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Transformer(WIDTH, 2, 2, 2, 20, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x, x)


add(KIND, "nn.Transformer", _Transformer)


class _Convolutional(nn.Module):
    def __init__(self, norm: type[nn.Module], *arguments: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(first, 8, 3, padding=1), norm(*arguments, 8), nn.GELU()) for first in (3, 8, 8))
        )
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean((2, 3)))


def _channels_last() -> nn.Module:
    return _Convolutional(nn.GroupNorm, 2).to(memory_format=torch.channels_last)


KIND.add(
    "convolutions in channels_last",
    seeded(_channels_last),
    features(3, 8, 8),
    loss=own_cross_entropy,
    known="bf16: engines gather weights contiguous, for which torch takes another kernel on some processors",
)
KIND.add(
    "BatchNorm", seeded(_Convolutional, nn.BatchNorm2d), features(3, 8, 8), loss=own_cross_entropy, low_buffers=True
)


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 8))
        self.first, self.middle, self.last = _convolution(3, 8), _convolution(16, 16), _convolution(16, 8)
        self.down, self.up = nn.Conv2d(8, 16, 3, 2, 1), nn.ConvTranspose2d(16, 8, 2, 2)
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        wide = self.first(x) + self.time(time)[:, :, None, None]
        return self.out(self.last(torch.cat([self.up(self.middle(self.down(wide))), wide], 1)))


def _convolution(first: int, last: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(first, last, 3, padding=1), nn.GroupNorm(2, last), nn.SiLU())


def _noised(index: int) -> Batch:
    return {
        "x": drawn(index).normal(3, 8, 8),
        "time": drawn(index, 1).normal(4),
        "noise": drawn(index, 2).normal(3, 8, 8),
    }


def _denoising(model: nn.Module, batch: Batch) -> Tensor:
    return functional.mse_loss(model(batch["x"], batch["time"]).float(), batch["noise"])


KIND.add("U-Net of a diffusion model", seeded(_UNet), _noised, loss=_denoising)


class Embedded(nn.Module):
    """An embedding, and blocks over it."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        self.blocks = stack()

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.embedding(x))


class _Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(WORDS, WIDTH, mode="sum")
        self.blocks = stack()

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.bag(x)).unsqueeze(1)


add(KIND, "EmbeddingBag", _Bag, words())
add(
    KIND,
    "embedding of 5,001 words with padding",
    lambda: Embedded(nn.Embedding(5001, WIDTH, padding_idx=0)),
    words(5001),
)
add(KIND, "embedding, scale_grad_by_freq", lambda: Embedded(nn.Embedding(9, WIDTH, scale_grad_by_freq=True)), words(9))
add(KIND, "embedding, max_norm", lambda: Embedded(nn.Embedding(WORDS, WIDTH, max_norm=1.0)), words())
add(
    KIND,
    "embedding, sparse",
    lambda: Embedded(nn.Embedding(WORDS, WIDTH, sparse=True)),
    words(),
    sections={"optimizer": {"name": "sgd", "lr": 0.05, "weight_decay": 0.0}},
)
