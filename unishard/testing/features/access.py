"""Loops that edit gradients and parameters, and loops that discard windows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import unishard
from unishard.config import Config
from unishard.testing import oracle
from unishard.testing.cells import Cell, Feature, Recorder
from unishard.testing.oracle import Curve

_SCALED, _ZEROED, _SINGLE = "blocks.0.up.weight", "blocks.1.down.bias", "blocks.2.scale"
"""Parameters of the MLP; the last has one element, so most ranks hold an empty shard."""
_DROPPED = {2: "inside", 6: "forward", 11: "end", 15: "reduced"}
"""Discarded windows, and where: after the first micro-batch, after a forward, at the end, at the end after reading a
gradient."""

Read = Callable[[str], Tensor]
Write = Callable[[str, Tensor], object]


def _noise(like: Tensor, seed: int) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like.device)


def _edit_gradients(update: int, read: Read, write: Write) -> None:
    write(_SCALED, read(_SCALED) * 3)
    write(_ZEROED, torch.zeros_like(read(_ZEROED)))
    write(_SINGLE, read(_SINGLE) + 0.1 * _noise(read(_SINGLE), update))


def _gradients_loop(engine: unishard.Engine, data: list[dict[str, Any]], cell: Cell) -> Curve:
    recorder = Recorder()
    for turn, micro_batch in enumerate(engine.batches(data), 1):
        loss = engine(**micro_batch).loss
        engine.backward(loss)
        if turn % cell.accumulation == 0:
            _edit_gradients(
                turn // cell.accumulation, lambda name: _some(engine.gradients.read(name)), engine.gradients.write
            )
        recorder.record(engine.mean(loss), engine.step())
    return recorder.curve()


def _some(gradient: Tensor | None) -> Tensor:
    if gradient is None:
        raise AssertionError("a parameter that every rank uses has no gradient")
    return gradient


def _gradients_reference(model: nn.Module, data: list[list[dict[str, Any]]], cfg: Config, cell: Cell) -> Curve:
    def edit(update: int, model: nn.Module) -> None:
        gradients = {name: _some(parameter.grad) for name, parameter in model.named_parameters()}
        _edit_gradients(update + 1, gradients.__getitem__, lambda name, value: gradients[name].copy_(value))

    return oracle.train(model, data, cfg, world=cell.world, before_update=edit)


def _edit_parameters(update: int, tensors: dict[str, Tensor]) -> None:
    tensors[_SCALED].mul_(0.9)
    tensors[_SINGLE].add_(_noise(tensors[_SINGLE], update), alpha=0.1)


def _parameters_loop(engine: unishard.Engine, data: list[dict[str, Any]], cell: Cell) -> Curve:
    recorder, update = Recorder(), 0
    for micro_batch in engine.batches(data):
        loss = engine(**micro_batch).loss
        engine.backward(loss)
        step = engine.step()
        recorder.record(engine.mean(loss), step)
        if not step.updated:
            continue
        if update % 3 == 0:
            engine.weights.write(_ZEROED, engine.weights.read(_ZEROED) + 0.01)
        with engine.weights.gathered([_SCALED, _SINGLE]) as tensors:
            _edit_parameters(update, tensors)
        with suppress(KeyError), engine.weights.gathered([_SCALED]) as tensors:
            tensors[_SCALED].zero_()
            raise KeyError("nothing of this is written")
        update += 1
    return recorder.curve()


def _parameters_reference(model: nn.Module, data: list[list[dict[str, Any]]], cfg: Config, cell: Cell) -> Curve:
    @torch.no_grad()
    def edit(update: int, model: nn.Module) -> None:
        tensors: dict[str, Tensor] = dict(model.named_parameters())
        if update % 3 == 0:
            tensors[_ZEROED].add_(0.01)
        _edit_parameters(update, tensors)

    return oracle.train(model, data, cfg, world=cell.world, after_update=edit)


def _dropping_loop(engine: unishard.Engine, data: list[dict[str, Any]], cell: Cell) -> Curve:
    recorder, length = Recorder(), cell.accumulation
    seen = enumerate(engine.batches(data))
    for window in range(len(data) // length):
        where = _DROPPED.get(window)
        for turn in range(length):
            last = turn + 1 == length
            loss = engine(**next(seen)[1]).loss
            if where == "forward" and last:
                engine.discard()
                break
            engine.backward(loss)
            if where == "reduced" and last:
                _some(engine.gradients.read(_SCALED))
            if where in ("end", "reduced") and last:
                engine.discard()
                break
            step = engine.step()
            if where == "inside":
                engine.discard()
                break
            if where is None:
                recorder.record(engine.mean(loss), step)
    return recorder.curve()


def _dropping_reference(model: nn.Module, data: list[list[dict[str, Any]]], cfg: Config, cell: Cell) -> Curve:
    windows = [window for index, window in enumerate(data) if index not in _DROPPED]
    return oracle.train(model, windows, cfg, world=cell.world)


_EDITED = Feature(
    "edited_gradients",
    "between backward and step one gradient is tripled, one zeroed, one made noisy; `engine.gradients.read`, "
    "`engine.gradients.write`",
    loop=_gradients_loop,
    reference=_gradients_reference,
)
_DISCARDED = Feature(
    "discarded_windows",
    "windows are discarded after a micro-batch, after a forward, at the end, or after reading a gradient; "
    "`engine.discard`",
    loop=_dropping_loop,
    reference=_dropping_reference,
    steps_in_suite=17,
)

FEATURES = (
    _EDITED,
    replace(
        _EDITED,
        name="edited_gradients_offloaded",
        about="the same with master weights and optimizer state in host memory",
        sections={"offload": {"optimizer": "cpu"}},
        strategies=("shard_optimizer", "shard_grad_op"),
    ),
    replace(
        _EDITED,
        name="edited_gradients_all_offloaded",
        about="the same with parameters in host memory as well",
        sections={"offload": "cpu"},
        strategies=("full_shard",),
    ),
    Feature(
        "edited_parameters",
        "master weights are replaced and edited after each update; `engine.weights.write`, `engine.weights.gathered`",
        loop=_parameters_loop,
        reference=_parameters_reference,
    ),
    _DISCARDED,
    replace(
        _DISCARDED,
        name="discarded_windows_offloaded",
        about="the same with master weights and optimizer state in host memory",
        sections={"offload": {"optimizer": "cpu"}},
        strategies=("shard_optimizer", "shard_grad_op"),
        precisions=("bf16",),
    ),
)
