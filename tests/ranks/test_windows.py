"""Accumulation windows that are weighted by items, change their length, or end in gradients that are not finite."""

from __future__ import annotations

import math
from itertools import product

import torch
from harness import (
    BACKENDS,
    DEEP,
    EACH,
    PAIRS,
    config,
    in_ranks,
    my_rank,
    own_share,
    prepare,
    refused,
    train,
    update,
)

import unishard

# -- num_items -------------------------------------------------------------------------------------


BAD = {
    "some": (1, None, "in one accumulation window; call it the same way for every micro-batch of a window"),
    "others": (None, 1, "in one accumulation window; call it the same way for every micro-batch of a window"),
    "negative": (-1, 1, "num_items must be a whole number of at least 0, got -1; "),
    "fraction": (1.5, 1, "num_items must be a whole number of at least 0, got 1.5; "),
    "several": (torch.ones(2).long(), 1, "num_items must be a whole number of at least 0, got tensor([1, 1]); "),
}


@in_ranks(cells=tuple(product(BACKENDS, BAD)), in_turn=True)
def test_counts_that_mean_nothing_are_refused(backend, name):
    *counts, wanted = BAD[name]

    def window(engine):
        for batch, count in zip(own_share(2), counts, strict=True):
            engine.backward(engine(**batch).loss, num_items=count)
            engine.step()

    with prepare(config(backend, "no_shard", training={"gradient_accumulation_steps": 2})) as engine:
        said = refused(window, engine)
    assert wanted in said


# -- windows ---------------------------------------------------------------------------------------


@in_ranks(cells=EACH, in_turn=True)
def test_windows_are_as_long_as_the_config_says_and_the_last_as_the_data(backend):
    with prepare(config(backend, "no_shard", training={"gradient_accumulation_steps": 2})) as engine:
        seen = []
        for window in engine.windows(own_share(5)):
            updates = []
            for batch in window:
                assert batch["x"].device == engine.device
                updates.append(update(engine, batch).updated)
            seen.append(updates)
        whole = next(iter(engine.windows(own_share(2))))
    assert seen == [[False, True], [False, True], [True]]
    assert (len(whole), len(whole[1:]), whole[1:][0]["x"].shape) == (2, 1, whole[-1]["x"].shape)


@in_ranks(cells=EACH, in_turn=True)
def test_a_length_must_be_positive(backend):
    with prepare(config(backend, "no_shard")) as engine:
        length = refused(next, engine.windows(own_share(2), lengths=[0]))
    assert "an accumulation window needs at least 1 batch, got a length of 0" in length


# -- nonfinite -------------------------------------------------------------------------------------

CELLS = tuple(
    (backend, strategy, precision, bad)
    for backend, strategy in PAIRS
    for precision in ("fp32", "bf16")
    for bad in (math.inf, math.nan)
    if (backend, strategy, precision) != ("deepspeed", "no_shard", "bf16")
    and (DEEP or (precision == "fp32") == (bad == math.inf))
)


def broken(engine, batch, bad):
    """A window in which rank 1 alone has bad gradients."""
    output = engine(**batch)
    engine.backward(output.loss * (bad if my_rank() else 1.0))
    return engine.step()


@in_ranks(cells=CELLS)
def test_ignore_makes_the_update_and_the_damage_shows(backend, strategy, precision, bad):
    with prepare(config(backend, strategy, precision=precision, training={"nonfinite": "ignore"})) as engine:
        first, second, third = own_share(3)
        train(engine, [first])
        step = broken(engine, second, bad)
        loss = engine(**third).loss
    assert step._replace(grad_norm=None) == unishard.Step(updated=True, grad_norm=None, lr=0.1, skipped=False)
    assert not math.isfinite(step.grad_norm)
    assert not loss.isfinite()


@in_ranks(cells=CELLS)
def test_raise_raises_on_every_rank_and_leaves_no_trace(backend, strategy, precision, bad):
    """What the engine does next is what one does that never saw the window."""
    runs = []
    for breaks in (False, True):
        with prepare(config(backend, strategy, precision=precision, training={"nonfinite": "raise"})) as engine:
            first, second, third = own_share(3)
            done = train(engine, [first])
            raised = refused(broken, engine, second, bad) if breaks else ""
            runs.append(done + train(engine, [third]))
    nowhere = "NonFiniteError: a gradient is infinite or NaN on at least one rank; nothing was updated; "
    assert raised.startswith(nowhere)
    assert runs[0] == runs[1]


def test_ignore_is_refused_where_deepspeed_cannot():
    report = unishard.translate(
        config("deepspeed", "no_shard", precision="bf16", training={"nonfinite": "ignore"})
    ).report
    (line,) = report.of(unishard.Fit.UNSUPPORTED)
    assert line.path == "training.nonfinite"
    assert "choose shard_optimizer" in line.note
