"""Accumulation windows that are weighted by items, change their length, or end in gradients that are not finite."""

from __future__ import annotations

import math

import pytest
import torch
from harness import BACKENDS, STRATEGIES, config, error, my_rank, own_share, play, prepare, train, values
from recording import Recorder

import unishard

# -- num_items -------------------------------------------------------------------------------------


def counted(backend, counts):
    """Norms of windows of two micro-batches whose losses are twice the mean, over `counts[rank]` items each."""
    norms = []
    with prepare(
        config(
            backend, "shard_grad_op", training={"gradient_accumulation_steps": 2}, optimizer={"name": "sgd", "lr": 0.0}
        )
    ) as engine:
        for batch in engine.batches(own_share(2)):
            engine.backward(2 * engine(**batch).loss, num_items=counts[my_rank()])
            norms.append(engine.step().grad_norm)
        for batch in engine.batches(own_share(2)):
            engine.backward(engine(**batch).loss)
            norms.append(engine.step().grad_norm)
    return norms


def mixed(backend, first, second):
    with prepare(config(backend, training={"gradient_accumulation_steps": 2})) as engine:
        one, two = own_share(2)
        engine.backward(engine(**one).loss, num_items=first)
        engine.step()
        engine.backward(engine(**two).loss, num_items=second)


def no_item(backend):
    with prepare(config(backend)) as engine:
        (batch,) = own_share(1)
        engine.backward(0 * engine(**batch).loss, num_items=0)
        try:
            engine.step()
        finally:
            (done,) = train(engine, own_share(1))
            assert done[1].updated


COUNTS = ((2, 2), (1, 3), (torch.tensor([0]), torch.tensor(4)))
BAD = {
    "some": (1, None),
    "others": (None, 1),
    "negative": (-1, 1),
    "fraction": (1.5, 1),
    "several": (torch.ones(2, dtype=torch.int64), 1),
}


def phases(backend, items):
    """Sums of int64 by the phase in which they are started."""
    with prepare(config(backend, "full_shard")) as engine:
        (batch,) = own_share(1)
        loss = engine(**batch).loss
        recorder = Recorder()
        with recorder:
            recorder.phase = "backward"
            engine.backward(loss, num_items=items)
            recorder.phase = "step"
            engine.step()
    return [event.phase for event in recorder.events if (event.kind, event.dtype) == ("all_reduce", "int64")]


ITEMS = (
    *((phases, (backend, items)) for backend in BACKENDS for items in (None, 4)),
    *((counted, (backend, counts)) for backend in BACKENDS for counts in COUNTS),
    *((mixed, (backend, *pair)) for backend in BACKENDS for pair in BAD.values()),
    *((no_item, (backend,)) for backend in BACKENDS),
)


@pytest.mark.parametrize("counts", COUNTS, ids=("even", "uneven", "tensors"))
@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_number_of_items_of_all_ranks_counts(backend, counts):
    for inside, weighted, also_inside, mean in values(play(ITEMS)[counted, (backend, counts)]):
        assert inside is None
        assert also_inside is None
        # Two micro-batches of 4 items on 2 ranks: the sum of 4 losses, doubled, over 8 items is their mean.
        assert weighted == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("pair", "said"),
    [
        ("some", "with num_items and without it in one accumulation window; pass it for every micro-batch"),
        ("others", "with num_items and without it in one accumulation window; pass it for every micro-batch"),
        ("negative", "num_items must be a whole number of at least 0, got -1; "),
        ("fraction", "num_items must be a whole number of at least 0, got 1.5; "),
        ("several", "num_items must be a whole number of at least 0, got tensor([1, 1]); "),
    ],
)
def test_counts_that_mean_nothing_are_refused(backend, pair, said):
    assert said in error(play(ITEMS)[mixed, (backend, *BAD[pair])])


@pytest.mark.parametrize("backend", BACKENDS)
def test_items_are_added_up_while_backward_runs(backend):
    assert values(play(ITEMS)[phases, (backend, None)]) == [[], []]
    assert values(play(ITEMS)[phases, (backend, 4)]) == [["backward"], ["backward"]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_without_items_is_an_error_that_leaves_the_engine_usable(backend):
    assert "num_items add up to 0 over the accumulation window" in error(play(ITEMS)[no_item, (backend,)])


# -- windows ---------------------------------------------------------------------------------------


def windowed(backend):
    with prepare(config(backend, training={"gradient_accumulation_steps": 2})) as engine:
        seen = []
        for window in engine.windows(own_share(5)):
            updates = []
            for batch in window:
                assert batch["x"].device == engine.device
                engine.backward(engine(**batch).loss)
                updates.append(engine.step().updated)
            seen.append(updates)
        whole = next(iter(engine.windows(own_share(2))))
        return seen, len(whole), len(whole[1:]), whole[1:][0]["x"].shape == whole[-1]["x"].shape


def bad_length(backend):
    with prepare(config(backend)) as engine:
        next(engine.windows(own_share(2), lengths=[0]))


def left_early(backend):
    with prepare(config(backend)) as engine:
        for window in engine.windows(own_share(3), lengths=[2, 1]):
            engine.backward(engine(**window[0]).loss)
            engine.step()


WINDOWS = tuple((function, (backend,)) for function in (windowed, bad_length, left_early) for backend in BACKENDS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_windows_are_as_long_as_the_config_says_and_the_last_as_the_data(backend):
    assert values(play(WINDOWS)[windowed, (backend,)]) == [([[False, True], [False, True], [True]], 2, 1, True)] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_length_must_be_positive_and_a_window_be_used_up(backend):
    assert "an accumulation window needs at least 1 batch, got a length of 0" in error(
        play(WINDOWS)[bad_length, (backend,)]
    )
    assert "a new accumulation window starts after 1 of 2 micro-batches" in error(play(WINDOWS)[left_early, (backend,)])


# -- nonfinite -------------------------------------------------------------------------------------

CELLS = tuple(
    (backend, strategy, precision, bad)
    for backend in BACKENDS
    for strategy in STRATEGIES
    for precision in ("fp32", "bf16")
    for bad in (math.inf, math.nan)
    if (backend, strategy, precision) != ("deepspeed", "no_shard", "bf16")
)


def broken(engine, batch, bad):
    """A window in which rank 1 alone has bad gradients."""
    output = engine(**batch)
    engine.backward(output.loss * (bad if my_rank() else 1.0))
    return engine.step()


def after_ignoring(backend, strategy, precision, bad):
    with prepare(config(backend, strategy, precision=precision, training={"nonfinite": "ignore"})) as engine:
        first, second, third = own_share(3)
        train(engine, [first])
        step = broken(engine, second, bad)
        return step._replace(grad_norm=math.isfinite(step.grad_norm)), bool(engine(**third).loss.isfinite())


def raising(backend, strategy, precision, bad):
    """What is raised, and what the engine does next, compared with one that never saw the window."""
    runs = []
    raised = ""
    for breaks in (True, False):
        with prepare(config(backend, strategy, precision=precision, training={"nonfinite": "raise"})) as engine:
            first, second, third = own_share(3)
            done = train(engine, [first])
            if breaks:
                try:
                    broken(engine, second, bad)
                except unishard.NonFiniteError as problem:
                    raised = str(problem)
            runs.append(done + train(engine, [third]))
    return raised, runs[0] == runs[1]


NONFINITE = tuple((function, cell) for function in (after_ignoring, raising) for cell in CELLS)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_ignore_makes_the_update_and_the_damage_shows(cell):
    wanted = unishard.Step(updated=True, grad_norm=False, lr=0.1, skipped=False)
    assert values(play(NONFINITE)[after_ignoring, cell]) == [(wanted, False)] * 2


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_raise_raises_on_every_rank_and_leaves_no_trace(cell):
    for raised, same in values(play(NONFINITE)[raising, cell]):
        assert raised.startswith("a gradient is infinite or NaN on at least one rank; nothing was updated; ")
        assert same


def test_ignore_is_refused_where_deepspeed_cannot():
    report = unishard.translate(
        config("deepspeed", "no_shard", precision="bf16", training={"nonfinite": "ignore"})
    ).report
    (line,) = report.of(unishard.Fit.UNSUPPORTED)
    assert line.path == "training.nonfinite"
    assert "choose shard_optimizer" in line.note
