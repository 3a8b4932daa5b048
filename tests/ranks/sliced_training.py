"""Trains models of which each rank has a part, and compares them with plain torch in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import unishard
from unishard.testing import oracle

UPDATES, WINDOW, SAMPLES, LENGTH = 2, 2, 2, 6
STRATEGIES = ("full_shard", "shard_grad_op")
Build = Callable[[str], nn.Module]


def tokens(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 32, (SAMPLES, LENGTH), generator=generator)


def loss_of(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.loss


def trained(engine: Any, readers: int, first: int = 0, updates: int = UPDATES) -> oracle.Curve:
    reader, losses, norms, total = engine.rank * readers // engine.world_size, [], [], 0.0
    micro_batches = range(first * WINDOW, (first + updates) * WINDOW)
    data = [tokens(number * readers + reader) for number in micro_batches]
    for batch in engine.batches([{"input_ids": each, "labels": each} for each in data]):
        loss = loss_of(engine(**batch))
        engine.backward(loss)
        total += engine.mean(loss) / WINDOW
        step = engine.step()
        if step.updated:
            losses.append(total)
            norms.append(step.grad_norm)
            total = 0.0
    return oracle.Curve(tuple(losses), tuple(norms), ())


MUON = {"name": "muon", "lr": 0.01, "adamw_lr": 0.01, "weight_decay": 0.1, "ns_dtype": "fp32", "eps": 1e-2}


def muon(model: nn.Module) -> torch.optim.Optimizer:
    """As of `MUON`, on whole matrices, without an engine."""
    inside = {name: each for name, each in model.named_parameters() if "layers" in name and each.dim() > 1}
    others = [each for name, each in model.named_parameters() if name not in inside]
    rest = {"params": others, "matrices": False, "lr": 0.01, "eps": 1e-2, "weight_decay": 0.1}
    return unishard.Muon([{"params": [*inside.values()]}, rest], lr=0.01, weight_decay=0.1, ns_dtype="fp32")


@cache
def plainly(build: Build, name: str, readers: int, kind: str = "sgd") -> tuple[oracle.Curve, dict[str, torch.Tensor]]:
    model = build(name)
    optimizer = muon(model) if kind == "muon" else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, norms, every = [], [], WINDOW * readers
    for update in range(UPDATES):
        total = 0.0
        for number in range(every):
            batch = tokens(update * every + number)
            loss = loss_of(model(input_ids=batch, labels=batch)) / every
            loss.backward()
            total += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return oracle.Curve(tuple(losses), tuple(norms), ()), weights


def compared(cfg: Any, build: Build, name: str) -> None:
    """Train, and compare losses, norms and weights."""
    with unishard.prepare(build(name), cfg) as engine:
        readers = engine.world_size // cfg.parallel.sharing
        curve = trained(engine, readers)
        reference, weights = plainly(build, name, readers, cfg.optimizer.name)
        own = {key: engine.weights.read(key) for key in weights}
        norms = engine.weights.norms()
    exact = cfg.precision.compute == "fp32"
    assert curve.losses == pytest.approx(reference.losses, rel=1e-6 if exact else 2e-2)
    assert curve.norms == pytest.approx(reference.norms, rel=1e-6 if exact else 5e-2)
    for key, value in weights.items() if exact else ():
        torch.testing.assert_close(own[key], value, rtol=0, atol=1e-6, msg=key)
        assert norms[key] == pytest.approx(value.norm().item(), rel=1e-5)
