"""Misuse of the training loop: one clear error on every rank, and no hang."""

from __future__ import annotations

import math

import pytest
from playing import config, error, own_share, play, prepare, train

from unishard.testing.cells import BACKENDS


def backward_twice(backend):
    with prepare(config(backend)) as engine:
        loss = engine(**own_share(1)[0]).loss
        engine.backward(loss)
        engine.backward(loss)


def step_without_backward(backend):
    with prepare(config(backend)) as engine:
        engine(**own_share(1)[0])
        engine.step()


def step_twice(backend):
    with prepare(config(backend)) as engine:
        engine.backward(engine(**own_share(1)[0]).loss)
        engine.step()
        engine.step()


def loss_with_a_shape(backend):
    with prepare(config(backend)) as engine:
        engine.backward(engine(**own_share(1)[0]).logits)


def loss_without_a_graph(backend):
    with prepare(config(backend)) as engine:
        engine.backward(engine(**own_share(1)[0]).loss.detach())


def loss_that_is_the_output(backend):
    with prepare(config(backend)) as engine:
        engine.backward(engine(**own_share(1)[0]))


def batch_without_backward(backend):
    with prepare(config(backend, training={"gradient_accumulation_steps": 3})) as engine:
        for index, batch in enumerate(engine.batches(own_share(6))):
            loss = engine(**batch).loss
            if index != 2:
                engine.backward(loss)
                engine.step()


def last_batch_without_backward(backend):
    with prepare(config(backend, training={"gradient_accumulation_steps": 3})) as engine:
        for index, batch in enumerate(engine.batches(own_share(3))):
            loss = engine(**batch).loss
            if index != 2:
                engine.backward(loss)
                engine.step()


def loss_of_the_bare_module(backend):
    with prepare(config(backend, "no_shard")) as engine:
        engine.backward(engine.module(**own_share(1)[0]).loss)


def loop_left_inside_a_window(backend):
    with prepare(config(backend, training={"gradient_accumulation_steps": 3})) as engine:
        train(engine, own_share(3))
        for batch in engine.batches(own_share(3)):
            engine.backward(engine(**batch).loss)
            engine.step()
            break
        train(engine, own_share(3))


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


def bad_clip(backend, value):
    with prepare(config(backend)) as engine:
        engine.backward(engine(**own_share(1)[0]).loss)
        engine.step(clip_grad_norm=value)


MISUSE = {
    (backward_twice, ()): "backward was called twice for one micro-batch; call engine.step()",
    (step_without_backward, ()): "step was called without a backward; call engine.backward(loss)",
    (step_twice, ()): "step was called without a backward",
    (loss_with_a_shape, ()): "a scalar loss, got shape (2, 11); pass its mean",
    (loss_without_a_graph, ()): "a loss with a graph",
    (loss_that_is_the_output, ()): "a scalar loss tensor, got MlpOutput; pass the loss itself",
    (batch_without_backward, ()): "after 2 of 3 micro-batches of the last one",
    (last_batch_without_backward, ()): "after 2 of 3 micro-batches of the last one",
    (loss_of_the_bare_module, ()): "without a forward of the engine; compute the loss with engine(...) in training mode, not engine.module",
    (loop_left_inside_a_window, ()): "after 1 of 3 micro-batches of the last one",
    **{(closed, (call,)): f"{call} was called on a closed engine" for call in ("forward", "backward", "step", "batches", "train")},
    **{(bad_clip, (value,)): f"clip_grad_norm must be a positive number, got {value!r}" for value in (0, -1.0, math.nan, "1")},
}


@pytest.mark.parametrize("misuse", MISUSE, ids=lambda misuse: "-".join(map(str, (misuse[0].__name__, *misuse[1]))))
@pytest.mark.parametrize("backend", BACKENDS)
def test_misuse_is_one_clear_contract_error_on_every_rank(backend, misuse):
    scenarios = tuple((function, (backend, *arguments)) for function, arguments in MISUSE)
    raised = error(play(scenarios)[misuse[0], (backend, *misuse[1])])
    assert raised.startswith("ContractError: ")
    assert MISUSE[misuse] in raised
