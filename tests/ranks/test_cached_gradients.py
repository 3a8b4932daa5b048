"""Losses over more samples than have a graph at once: the gradient at the embeddings is cached (GradCache)."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from harness import config, my_rank, play, values
from harness.training import SPANNING
from mistakes.forwards import WIDTH, Block
from torch import nn
from torch.nn import functional

import unishard

CHUNKS, SIZE, UPDATES = 3, 2, 2


def build():
    torch.manual_seed(4)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 5))


def pairs(update, rank):
    return torch.randn(CHUNKS * SIZE, 2, WIDTH, generator=torch.Generator().manual_seed(10 * update + rank))


def contrastive(embeddings):
    first, second = embeddings.float().unbind(1)
    return functional.cross_entropy(first @ second.t(), torch.arange(len(embeddings)))


def trained(backend, strategy, precision):
    found = []
    cfg = config(backend, strategy, precision=precision, training={"gradient_accumulation_steps": CHUNKS})
    with unishard.prepare(build(), cfg) as engine:
        for update in range(UPDATES):
            chunks = pairs(update, my_rank()).split(SIZE)
            with torch.no_grad():
                cached = torch.cat([engine(chunk) for chunk in chunks])
            loss = contrastive(cached.requires_grad_())
            loss.backward()
            for chunk, gradient in zip(chunks, cached.grad.split(SIZE), strict=True):
                engine.framework.scaled_backward((engine(chunk) * gradient).sum())
                step = engine.step()
            found += [engine.mean(loss), step.grad_norm]
    return found


@cache
def plain():
    model, found = build(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for update in range(UPDATES):
        loss = sum(contrastive(model(pairs(update, rank))) for rank in range(2)) / 2
        loss.backward()
        found += [loss.item(), nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item()]
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("cell", SPANNING, ids="-".join)
def test_chunks_train_as_the_whole_batch_does_in_plain_torch(cell):
    for found in values(play(tuple((trained, each) for each in SPANNING))[trained, cell]):
        assert found == pytest.approx(plain(), rel=1e-5 if cell[2] == "fp32" else 5e-2)
