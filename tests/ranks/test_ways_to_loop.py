"""A loop that is written a little differently keeps its place in the data, or is told what it loses."""

from __future__ import annotations

import itertools
import warnings
from functools import partial

import pytest
import torch
from harness import EACH, caught, in_ranks, in_turn, on_ranks, play, refused, values
from harness.training import config, everyones, my_rank, prepare, update
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from tqdm import tqdm

import unishard
from unishard.testing.models import batch

ROWS = 16


def rows():
    """The model's samples, each with its number."""
    return [{name: value[0] for name, value in batch("mlp", row, 1).items()} | {"row": row} for row in range(ROWS)]


def configured(backend, accumulate=1, **training):
    return config(backend, "no_shard", training={"gradient_accumulation_steps": accumulate, **training})


class Around:
    """A user's object around a loader."""

    def __init__(self, loader, ahead=0):
        self.loader, self.ahead = loader, ahead

    def __iter__(self):
        kept = []
        for each in self.loader:
            kept.append(each)
            if len(kept) > self.ahead:
                yield kept.pop(0)
        yield from kept


def quiet(loader):
    return tqdm(loader, disable=True)


def from_generator(loader):
    yield from loader


def train(engine, batches, stop=None):
    """Train on what a loop yields, for `stop` updates at most; the rows of each micro-batch."""
    seen = []
    for each in batches:
        micro_batch = dict(each)
        seen.append(micro_batch.pop("row").tolist())
        engine.backward(engine(**micro_batch).loss)
        engine.step()
        if len(seen) == stop:
            break
    return seen


def told(run):
    """What a function returns, and what it warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        value = run()
    return value, [
        str(each.message) for each in caught if "engine." in str(each.message) or "position" in str(each.message)
    ]


# -- iterated again --------------------------------------------------------------------------------


def epochs_are_the_same(backend):
    """Three epochs over one object, over new ones, over a bar around one, and by `next`; and their lengths."""
    cfg, data, runs = configured(backend, 2), rows(), {}
    with prepare(cfg) as engine:
        world = engine.world_size
        it = engine.batches(unishard.dataloader(data, cfg))
        epochs = [train(engine, it) for _ in range(3)]
    with prepare(cfg) as engine:
        loader = unishard.dataloader(data, cfg)
        runs["anew"] = [train(engine, engine.batches(loader)) for _ in range(3)]
    with prepare(cfg) as engine:
        bar = tqdm(engine.batches(unishard.dataloader(data, cfg)), disable=True)
        runs["a bar"] = [train(engine, bar) for _ in range(3)]
        assert len(bar) == 8 // world
    with prepare(cfg) as engine:
        it = engine.batches(unishard.dataloader(data, cfg))
        first = next(it)
        runs["next"] = [train(engine, itertools.chain([first], it)), *(train(engine, it) for _ in range(2))]
        assert len(engine.windows(unishard.dataloader(data, cfg))) == 4 // world
    assert [len(epoch) for epoch in epochs] == [8 // world] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    assert runs == dict.fromkeys(runs, epochs)


@pytest.mark.parametrize(("backend", "world"), [("fsdp", 1), ("deepspeed", 2)])
def test_one_object_gives_every_epoch(backend, world):
    on_ranks(epochs_are_the_same, backend, world=world)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(rows())


@in_ranks(world=1)
def test_the_length_is_that_of_the_next_pass():
    for drop, uneven, listed in (("step", 7, 5), ("drop", 6, 4)):
        cfg = configured("fsdp", 2, last_window=drop)
        with prepare(cfg) as engine:
            for loader, length in (
                (unishard.dataloader(rows()[:-2], cfg), uneven),
                ([next(iter(DataLoader(rows(), batch_size=2)))] * 5, listed),
                (StatefulDataLoader(rows()[:10], batch_size=2), listed),
            ):
                it = engine.batches(loader)
                assert (len(it), len(train(engine, it))) == (length, length)
            it = engine.batches(DataLoader(Stream(), batch_size=2))
            assert caught(TypeError, len, it) == "TypeError: DataLoader has no length"
            assert len(train(engine, it)) == 8
            engine.eval()
            assert len(engine.batches(unishard.dataloader(rows()[:-2], cfg))) == 7


# -- wrappers --------------------------------------------------------------------------------------

KEEPS = {
    "tqdm": quiet,
    "an object": Around,
    "two": lambda loader: Around(quiet(loader)),
    "itself": lambda loader: loader,
    "workers": lambda loader: quiet(unishard.dataloader(loader.dataset, configured("fsdp"), num_workers=1)),
}
LOSES = {
    "enumerate": lambda loader: (each for _, each in enumerate(loader)),
    "islice": lambda loader: itertools.islice(loader, 100),
    "chain": lambda loader: itertools.chain(loader),
    "generator": from_generator,
    "reads ahead": partial(Around, ahead=1),
}


@in_ranks(cells=(("fsdp", False), ("deepspeed", True)))
def test_a_wrapper_keeps_the_position_or_one_warning_says_what_is_lost(backend, stateful):
    """The rows before a stop in the middle of an epoch and after it, and what is left by `len`."""
    cfg, data = configured(backend), rows()

    def make():
        if stateful:
            return StatefulDataLoader(data[my_rank() :: 2], batch_size=2)
        return unishard.dataloader(data, cfg)

    for name, wrap in {**KEEPS, **LOSES}.items():
        if stateful and name not in ("tqdm", "itself", "enumerate", "islice", "chain", "generator"):
            continue

        def run(wrap=wrap):
            with prepare(cfg) as engine:
                before = train(engine, engine.batches(wrap(make())), stop=3)
                where = engine._batching.position()
            with prepare(cfg) as engine:
                engine._batching.resume([where, where], 2)
                it = engine.batches(wrap(make()))
                left = len(it) if hasattr(it._loader, "__len__") else None
                return before, train(engine, it), left

        (before, after, left), said = told(run)
        if name in KEEPS:
            assert said == [], name
            assert left in (None, 1), name
            assert sorted(itertools.chain(*before, *after)) == sorted(set(itertools.chain(*before, *after))), name
            assert (len(before), len(after)) == (3, 1), name
        else:
            assert len(after) == 4, name
            assert len(said) == 2, name  # one of each run
            assert "checkpoint has no" in said[0], name
        assert name != "islice" or "write itertools.islice(engine.batches(loader), n)" in said[0]


@in_ranks
def test_an_iterator_that_is_read_again_is_named():
    def run():
        with prepare(configured("fsdp")) as engine:
            it = engine.batches(iter([batch("mlp", my_rank(), 1)] * 3))
            return [len([update(engine, each) for each in it]) for _ in range(2)]

    counts, said = told(run)
    assert counts == [3, 0]
    assert said == [
        "this pass over engine.batches() read nothing: list_iterator is an iterator, which an earlier pass has "
        "read to its end; pass the loader itself"
    ]


# -- a second loader -------------------------------------------------------------------------------


def validated(backend, when, how):
    """The losses of a training with validations, the position after it, and the warnings."""
    cfg, data = configured(backend), rows()

    def run():
        losses, places = [], []
        with prepare(cfg) as engine:
            valid = unishard.dataloader(data[:8], cfg, shuffle=False)
            for index, each in enumerate(engine.batches(unishard.dataloader(data, cfg))):
                if when == "before" and index % 2:
                    validate(engine, valid, how)
                micro_batch = dict(each)
                micro_batch.pop("row")
                loss = engine(**micro_batch).loss
                engine.backward(loss)
                engine.step()
                losses.append(engine.mean(loss))
                if when == "after" and index % 2:
                    validate(engine, valid, how)
                places.append(engine._batching.position()["state"]["samples"])
            validate(engine, valid, how)
            places.append(engine._batching.position()["state"]["epoch"])
        return losses, places

    return told(run)


def validate(engine, valid, how):
    if how == "eval":
        engine.eval()
    with torch.no_grad():
        for each in engine.batches(valid):
            micro_batch = dict(each)
            micro_batch.pop("row")
            engine(**micro_batch)
            if how == "left":
                break
    engine.train()


@in_turn
def test_a_validation_takes_no_position(backend):
    cells = [(backend, when, how) for when in ("after", "before") for how in ("eval", "no", "left")]
    played = play(tuple((validated, cell) for cell in cells))
    wanted = values(played[validated, cells[0]])
    for cell in cells:
        for (right, _), (found, said) in zip(wanted, values(played[validated, cell]), strict=True):
            assert found == right, cell
            assert right[1] == [4, 8, 12, 0, 1]
            assert len(said) == (0 if cell[2] == "eval" else 1), cell
            assert all("call engine.eval() before and engine.train() after it" in text for text in said)


@in_ranks(cells=(("fsdp",),))
def test_two_training_loaders_in_turn_are_named(backend):
    cfg, data = configured(backend), rows()

    def run():
        with prepare(cfg) as engine:
            loops = [engine.batches(unishard.dataloader(part, cfg)) for part in (data[:8], data[8:])]
            for pair in zip(*loops, strict=True):
                train(engine, [pair[0]])
                train(engine, [pair[1]])
            return engine._batching.position()

    where, said = told(run)
    assert where is None
    (line,) = said
    turns = "two loops over engine.batches() are read in turn in training mode, so a checkpoint has no position"
    assert line.startswith(turns)


@in_ranks(cells=(("fsdp",),))
def test_a_loop_that_an_error_has_left_is_no_second_one(backend):
    """Though it is still held, as by a notebook."""
    cfg, data = configured(backend), rows()

    def run():
        with prepare(cfg) as engine:
            held = iter(engine.batches(unishard.dataloader(data[:8], cfg)))
            train(engine, [next(held)])
            next(held)
            train(engine, engine.batches(unishard.dataloader(data, cfg)), stop=2)
            return engine._batching.position()["state"]

    where, said = told(run)
    assert (where["samples"], where["dataset_length"], said) == (8, 16, [])


@in_ranks(cells=(("fsdp",),))
def test_a_metric_counts_each_sample_once_or_is_refused(backend):
    """Over 14 samples on two ranks, by what is around the loader; a warning comes with the first batch."""
    cfg, data = configured(backend), rows()[:-2]
    with prepare(cfg) as engine:
        engine.eval()

        def count(wrap):
            loader = wrap(unishard.dataloader(data, cfg, shuffle=False))
            return sum(len(engine.gather_for_metrics(each["row"])) for each in engine.batches(loader))

        assert told(lambda: count(quiet)) == (14, [])
        refusal, (said,) = told(lambda: refused(count, from_generator))
    assert "2 are of samples that fill them up" in refusal
    assert "engine.gather_for_metrics cannot leave out the 2 samples that fill up the last batches" in said


# -- without engine.batches ------------------------------------------------------------------------


def shares():
    return everyones(0, 4, world=2)[my_rank() :: 2]


@in_ranks(cells=EACH, in_turn=True)
def test_an_evaluation_without_engine_batches_beside_an_own_share_is_not_warned_of(backend):
    cfg, data = configured(backend), rows()

    def run():
        with prepare(cfg) as engine:
            for each in shares():
                engine.eval()
                for _ in unishard.dataloader(data, cfg):
                    engine(**shares()[0])
                engine.train()
                train(engine, [each | {"row": torch.zeros(1)}])

    assert told(run)[1] == []
