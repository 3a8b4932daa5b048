"""Calls of the training loop in the wrong order, or with the wrong things."""

from __future__ import annotations

import math

import torch
from harness import checked as config
from harness import own_share, prepare, train

from mistakes.mistake import mistake


@mistake("`engine.backward(loss)` twice for one micro-batch")
def backward_twice(backend):
    with prepare(config(backend, "no_shard")) as engine:
        loss = engine(**own_share(1)[0]).loss
        engine.backward(loss)
        engine.backward(loss)


@mistake("`engine.step()` without a backward")
def step_without_backward(backend):
    with prepare(config(backend, "no_shard")) as engine:
        engine(**own_share(1)[0])
        engine.step()


@mistake("`engine.step()` twice")
def step_twice(backend):
    with prepare(config(backend, "no_shard")) as engine:
        engine.backward(engine(**own_share(1)[0]).loss)
        engine.step()
        engine.step()


@mistake("a loss per sample in `engine.backward`")
def loss_with_a_shape(backend):
    with prepare(config(backend, "no_shard")) as engine:
        engine.backward(engine(**own_share(1)[0]).logits)


@mistake("`engine.backward(loss.detach())`, or a loss computed under `no_grad`")
def loss_without_a_graph(backend):
    with prepare(config(backend, "no_shard")) as engine:
        engine.backward(engine(**own_share(1)[0]).loss.detach())


@mistake("`engine.backward(output)`")
def loss_that_is_the_output(backend):
    with prepare(config(backend, "no_shard")) as engine:
        engine.backward(engine(**own_share(1)[0]))


@mistake("a `continue` that skips `engine.backward(loss)`")
def batch_without_backward(backend):
    with prepare(config(backend, "no_shard", training={"gradient_accumulation_steps": 3})) as engine:
        for index, batch in enumerate(engine.batches(own_share(6))):
            loss = engine(**batch).loss
            if index != 2:
                engine.backward(loss)
                engine.step()


@mistake("a `continue` that skips `engine.backward(loss)` of the last batch of the data")
def last_batch_without_backward(backend):
    with prepare(config(backend, "no_shard", training={"gradient_accumulation_steps": 3})) as engine:
        for index, batch in enumerate(engine.batches(own_share(3))):
            loss = engine(**batch).loss
            if index != 2:
                engine.backward(loss)
                engine.step()


@mistake("`engine.module(**batch)` instead of `engine(**batch)`")
def loss_of_the_bare_module(backend):
    with prepare(config(backend, "no_shard")) as engine:
        engine.backward(engine.module(**own_share(1)[0]).loss)


@mistake("a `break` inside an accumulation window")
def loop_left_inside_a_window(backend):
    with prepare(config(backend, "no_shard", training={"gradient_accumulation_steps": 3})) as engine:
        train(engine, own_share(3))
        for batch in engine.batches(own_share(3)):
            engine.backward(engine(**batch).loss)
            engine.step()
            break
        train(engine, own_share(3))


@mistake("calls on a closed engine", "forward")
@mistake("`engine.backward` on a closed engine", "backward")
@mistake("`engine.step` on a closed engine", "step")
@mistake("`engine.batches` on a closed engine", "batches")
@mistake("`engine.eval` on a closed engine", "train")
def closed(backend, call):
    engine = prepare(config(backend, "no_shard"))
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


@mistake(
    "a gradient penalty, `torch.autograd.grad(..., create_graph=True)` of an output, elsewhere than under `no_shard` of FSDP"
)
def gradient_penalty(backend):
    batch = own_share(1)[0]
    with prepare(config(backend)) as engine:
        x = batch["x"].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(engine(**batch | {"x": x}).loss, x, create_graph=True)
        engine.backward(gradient.square().mean())


@mistake("`clip_grad_norm=0` to turn clipping off", 0)
@mistake("`clip_grad_norm=-1.0`", -1.0)
@mistake("`clip_grad_norm=math.nan`", math.nan)
@mistake('`clip_grad_norm="1"`', "1")
def bad_clip(backend, value):
    with prepare(config(backend, "no_shard")) as engine:
        engine.backward(engine(**own_share(1)[0]).loss)
        engine.step(clip_grad_norm=value)
