"""Accumulation windows of varying length, and losses that are sums over unevenly distributed items."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import unishard
from unishard.config import Config
from unishard.testing import oracle
from unishard.testing.cells import MICRO_BATCH, Cell, Feature, Recorder
from unishard.testing.models import MODELS
from unishard.testing.oracle import Curve


def _uneven(batch: dict[str, Any], turn: int, rank: int) -> dict[str, Any]:
    """A micro-batch with some labels ignored: in some micro-batches all of them, but never on all ranks."""
    labels = batch["labels"].clone()
    flat = labels.view(-1)
    flat[: (5 * turn + 3 * rank) % len(flat)] = -100
    if rank == 1 and turn % 3 == 1:
        flat[:] = -100
    return batch | {"labels": labels}


def _sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the cross entropies of all labels that are not ignored; causal models predict the next token."""
    if logits.dim() == 3:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return functional.cross_entropy(
        logits.float().reshape(-1, logits.shape[-1]), labels.reshape(-1), reduction="sum", ignore_index=-100
    )


def _count(labels: torch.Tensor) -> torch.Tensor:
    return ((labels[:, 1:] if labels.dim() == 2 else labels) != -100).sum()


def _inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch without ignored labels, since the model's own loss is not used."""
    return {**batch, "labels": batch["labels"].clamp(min=0)}


def _loss(model: Callable[..., Any], batch: Mapping[str, Any]) -> torch.Tensor:
    return _sum(model(**_inputs(batch)).logits, batch["labels"])


def _weighted_loop(engine: unishard.Engine, data: list[dict[str, Any]], cell: Cell) -> Curve:
    rank = unishard.Topology.from_environment().rank
    recorder, losses, items = Recorder(), 0.0, 0.0
    for batch in engine.batches([_uneven(batch, turn, rank) for turn, batch in enumerate(data)]):
        loss = _loss(engine, batch)
        engine.backward(loss, num_items=_count(batch["labels"]))
        losses, items = losses + engine.mean(loss), items + engine.mean(_count(batch["labels"]))
        step = engine.step()
        if step.updated:
            recorder.record(losses / items, step)
            losses, items = 0.0, 0.0
    return recorder.curve()


def _weighted_reference(model: nn.Module, data: list[list[dict[str, Any]]], cfg: Config, cell: Cell) -> Curve:
    uneven = [
        [
            _uneven(batch, update * cell.accumulation + index // cell.world, index % cell.world)
            for index, batch in enumerate(window)
        ]
        for update, window in enumerate(data)
    ]
    return oracle.train(
        model, uneven, cfg, world=cell.world, summed=oracle.Summed(_loss, lambda batch: int(_count(batch["labels"])))
    )


def _lengths(cell: Cell) -> list[int]:
    """Micro-batches of each rank in each window."""
    return [1 + update % 3 for update in range(cell.steps)]


def _changing_loop(engine: unishard.Engine, data: list[dict[str, Any]], cell: Cell) -> Curve:
    recorder = Recorder()
    for window in engine.windows(data, lengths=_lengths(cell)):
        for batch in window:
            loss = engine(**batch).loss
            engine.backward(loss)
            recorder.record(engine.mean(loss), engine.step())
    return recorder.curve()


def _changing_reference(model: nn.Module, data: list[list[dict[str, Any]]], cfg: Config, cell: Cell) -> Curve:
    return oracle.train(model, list(_cut([batch for window in data for batch in window], cell)), cfg, world=cell.world)


def _cut(batches: list[dict[str, Any]], cell: Cell) -> Iterator[list[dict[str, Any]]]:
    start = 0
    for length in _lengths(cell):
        yield batches[start : start + length * cell.world]
        start += length * cell.world


def _samples(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{key: values[at : at + 1] for key, values in batch.items()} for at in range(MICRO_BATCH)]


def _loop_of_parts(engine: unishard.Engine, data: list[dict[str, Any]], cell: Cell) -> Curve:
    recorder = Recorder()
    for batch in engine.batches(data):
        mean = 0.0
        for sample in _samples(batch):
            part = engine(**sample).loss / MICRO_BATCH
            engine.backward(part)
            mean += engine.mean(part)
        recorder.record(mean, engine.step())
    return recorder.curve()


def _reference_of_parts(model: nn.Module, data: list[list[dict[str, Any]]], cfg: Config, cell: Cell) -> Curve:
    samples = [[sample for batch in window for sample in _samples(batch)] for window in data]
    return oracle.train(model, samples, cfg, world=cell.world)


FEATURES = (
    Feature(
        "items",
        "losses are sums over labels that are unevenly distributed over micro-batches and ranks; `backward(loss_sum, "
        "num_items=n)`",
        models=MODELS,
        loop=_weighted_loop,
        reference=_weighted_reference,
        accumulation=3,
    ),
    Feature(
        "changing_windows",
        "windows of 1, 2 and 3 micro-batches in turn",
        loop=_changing_loop,
        reference=_changing_reference,
    ),
    Feature(
        "backward_calls",
        "each sample of a micro-batch has a forward and a backward of its own",
        sections={"training": {"backward_calls": MICRO_BATCH}},
        models=MODELS,
        loop=_loop_of_parts,
        reference=_reference_of_parts,
    ),
)
