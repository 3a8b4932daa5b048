"""Calls of the training loop in the wrong order, or with the wrong things."""

from __future__ import annotations

import math

import torch
from playing import checked as config
from playing import own_share, prepare, train

from mistakes.mistake import Mistakes

LOOP = Mistakes("The training loop")


@LOOP.raises(
    "`engine.backward(loss)` twice for one micro-batch",
    "ContractError: backward was called twice for one micro-batch; call engine.step() after every backward",
)
def backward_twice(backend):
    with prepare(config(backend)) as engine:
        loss = engine(**own_share(1)[0]).loss
        engine.backward(loss)
        engine.backward(loss)


@LOOP.raises(
    "`engine.step()` without a backward",
    "ContractError: step was called without a backward; call engine.backward(loss) first...",
)
def step_without_backward(backend):
    with prepare(config(backend)) as engine:
        engine(**own_share(1)[0])
        engine.step()


@LOOP.raises(
    "`engine.step()` twice", "ContractError: step was called without a backward; call engine.backward(loss) first..."
)
def step_twice(backend):
    with prepare(config(backend)) as engine:
        engine.backward(engine(**own_share(1)[0]).loss)
        engine.step()
        engine.step()


@LOOP.raises(
    "a loss per sample in `engine.backward`",
    "ContractError: backward needs a scalar loss, got shape (2, 11); pass its mean, such as loss.mean()",
)
def loss_with_a_shape(backend):
    with prepare(config(backend)) as engine:
        engine.backward(engine(**own_share(1)[0]).logits)


@LOOP.raises(
    "`engine.backward(loss.detach())`, or a loss computed under `no_grad`",
    "ContractError: backward needs a loss with a graph; it was computed in evaluation mode, under no_grad, detached...",
)
def loss_without_a_graph(backend):
    with prepare(config(backend)) as engine:
        engine.backward(engine(**own_share(1)[0]).loss.detach())


@LOOP.raises(
    "`engine.backward(output)`",
    "ContractError: backward needs a scalar loss tensor, got MlpOutput; pass the loss itself...",
)
def loss_that_is_the_output(backend):
    with prepare(config(backend)) as engine:
        engine.backward(engine(**own_share(1)[0]))


@LOOP.raises(
    "a `continue` that skips `engine.backward(loss)`",
    "ContractError: a new accumulation window starts after 2 of 3 micro-batches of the last one; call backward and "
    "step for every batch...",
)
def batch_without_backward(backend):
    with prepare(config(backend, training={"gradient_accumulation_steps": 3})) as engine:
        for index, batch in enumerate(engine.batches(own_share(6))):
            loss = engine(**batch).loss
            if index != 2:
                engine.backward(loss)
                engine.step()


@LOOP.raises(
    "the same at the last batch of the data",
    "ContractError: a new accumulation window starts after 2 of 3 micro-batches of the last one; call backward and "
    "step for every batch...",
)
def last_batch_without_backward(backend):
    with prepare(config(backend, training={"gradient_accumulation_steps": 3})) as engine:
        for index, batch in enumerate(engine.batches(own_share(3))):
            loss = engine(**batch).loss
            if index != 2:
                engine.backward(loss)
                engine.step()


@LOOP.raises(
    "`engine.module(**batch)` instead of `engine(**batch)`",
    "ContractError: backward was called without a forward of the engine; compute the loss with engine(...) in training "
    "mode...",
)
def loss_of_the_bare_module(backend):
    with prepare(config(backend, "no_shard")) as engine:
        engine.backward(engine.module(**own_share(1)[0]).loss)


@LOOP.raises(
    "a `break` inside an accumulation window",
    "ContractError: a new accumulation window starts after 1 of 3 micro-batches...leave a loop only when "
    "step().updated...",
)
def loop_left_inside_a_window(backend):
    with prepare(config(backend, training={"gradient_accumulation_steps": 3})) as engine:
        train(engine, own_share(3))
        for batch in engine.batches(own_share(3)):
            engine.backward(engine(**batch).loss)
            engine.step()
            break
        train(engine, own_share(3))


@LOOP.raises(
    "calls on a closed engine",
    "ContractError: forward was called on a closed engine; build a new model and prepare it",
    "forward",
)
@LOOP.raises(
    "`engine.backward` on a closed engine", "ContractError: backward was called on a closed engine...", "backward"
)
@LOOP.raises("`engine.step` on a closed engine", "ContractError: step was called on a closed engine...", "step")
@LOOP.raises(
    "`engine.batches` on a closed engine", "ContractError: batches was called on a closed engine...", "batches"
)
@LOOP.raises("`engine.eval` on a closed engine", "ContractError: train was called on a closed engine...", "train")
def closed(backend, call):
    engine = prepare(config(backend))
    batch = own_share(1)[0]
    loss = engine(**batch).loss
    engine.close()
    engine.close()
    {
        "forward": lambda: engine(**batch),
        "backward": lambda: engine.backward(loss),
        "step": engine.step,
        "batches": lambda: list(engine.batches([batch])),
        "train": engine.eval,
    }[call]()


@LOOP.raises(
    "a gradient penalty, `torch.autograd.grad(..., create_graph=True)` of an output, elsewhere than under `no_shard` "
    "of FSDP",
    "ContractError: torch.autograd.grad of an output with create_graph=True, as for a gradient penalty, does not work "
    "with sharding.strategy full_shard ...; set ...sharding: no_shard and precision: fp32...",
)
def gradient_penalty(backend):
    batch = own_share(1)[0]
    with prepare(config(backend)) as engine:
        x = batch["x"].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(engine(**batch | {"x": x}).loss, x, create_graph=True)
        engine.backward(gradient.square().mean())


@LOOP.raises(
    "`clip_grad_norm=0` to turn clipping off",
    "ContractError: clip_grad_norm must be a positive number, got 0; pass None for no clipping",
    0,
)
@LOOP.raises("`clip_grad_norm=-1.0`", "ContractError: clip_grad_norm must be a positive number, got -1.0...", -1.0)
@LOOP.raises(
    "`clip_grad_norm=math.nan`", "ContractError: clip_grad_norm must be a positive number, got nan...", math.nan
)
@LOOP.raises('`clip_grad_norm="1"`', "ContractError: clip_grad_norm must be a positive number, got '1'...", "1")
def bad_clip(backend, value):
    with prepare(config(backend)) as engine:
        engine.backward(engine(**own_share(1)[0]).loss)
        engine.step(clip_grad_norm=value)
