"""A loop that is written a little differently keeps its place in the data, or is told what it loses."""

from __future__ import annotations

import itertools
import warnings
from functools import partial

import pytest
import torch
from harness import config, everyones, in_turn, my_rank, on_ranks, play, prepare, refused, values
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
    return config(backend, "full_shard", training={"gradient_accumulation_steps": accumulate, **training})


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


def again(backend):
    """Three epochs over one object, over new ones, over a bar around one, and by `next`; and their lengths."""
    cfg, data, runs = configured(backend, 2), rows(), {}
    with prepare(cfg) as engine:
        it = engine.batches(unishard.dataloader(data, cfg))
        runs["again"] = [train(engine, it) for _ in range(3)]
    with prepare(cfg) as engine:
        loader = unishard.dataloader(data, cfg)
        runs["anew"] = [train(engine, engine.batches(loader)) for _ in range(3)]
    with prepare(cfg) as engine:
        bar = tqdm(engine.batches(unishard.dataloader(data, cfg)), disable=True)
        runs["a bar"] = [train(engine, bar) for _ in range(3)]
        runs["total"] = len(bar)
    with prepare(cfg) as engine:
        it = engine.batches(unishard.dataloader(data, cfg))
        first = next(it)
        runs["next"] = [train(engine, itertools.chain([first], it)), *(train(engine, it) for _ in range(2))]
        runs["windows"] = len(engine.windows(unishard.dataloader(data, cfg)))
    return runs


@pytest.mark.parametrize(("backend", "world"), [("fsdp", 1), ("deepspeed", 2)])
def test_one_object_gives_every_epoch(backend, world):
    for runs in on_ranks(again, backend, world=world):
        epochs = runs["again"]
        assert [len(epoch) for epoch in epochs] == [8 // world] * 3
        assert epochs[0] != epochs[1] != epochs[2]
        assert runs["anew"] == runs["a bar"] == runs["next"] == epochs
        assert (runs["total"], runs["windows"]) == (8 // world, 4 // world)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(rows())


def lengths(drop):
    """Lengths of loops, and how much they yield."""
    cfg = configured("fsdp", 2, last_window=drop)
    found = {}
    with prepare(cfg) as engine:
        for name, loader in (
            ("uneven", unishard.dataloader(rows()[:-2], cfg)),
            ("list", [next(iter(DataLoader(rows(), batch_size=2)))] * 5),
            ("stateful", StatefulDataLoader(rows()[:10], batch_size=2)),
            ("stream", DataLoader(Stream(), batch_size=2)),
        ):
            it = engine.batches(loader)
            try:
                length = len(it)
            except TypeError as error:
                length = str(error)
            found[name] = (length, len(train(engine, it)))
        engine.eval()
        found["evaluation"] = len(engine.batches(unishard.dataloader(rows()[:-2], cfg)))
    return found


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_the_length_is_that_of_the_next_pass():
    scenarios = tuple((lengths, (each,)) for each in ("step", "drop"))
    played = play(scenarios, 1)
    (step,), (drop,) = (values(played[scenario]) for scenario in scenarios)
    assert step == {
        "uneven": (7, 7),
        "list": (5, 5),
        "stateful": (5, 5),
        "stream": ("DataLoader has no length", 8),
        "evaluation": 7,
    }
    assert drop == {
        "uneven": (6, 6),
        "list": (4, 4),
        "stateful": (4, 4),
        "stream": ("DataLoader has no length", 8),
        "evaluation": 7,
    }


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


def stopped_and_resumed(backend, stateful):
    """For each wrapper: the rows before a stop in the middle of an epoch and after it, what is left by `len`, and the
    warnings."""
    cfg, data = configured(backend), rows()

    def make():
        if stateful:
            return StatefulDataLoader(data[my_rank() :: 2], batch_size=2)
        return unishard.dataloader(data, cfg)

    found = {}
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
                after = train(engine, it)
            return before, after, left

        found[name] = told(run)
    return found


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(("backend", "stateful"), [("fsdp", False), ("deepspeed", True)])
def test_a_wrapper_keeps_the_position_or_one_warning_says_what_is_lost(backend, stateful):
    for found in on_ranks(stopped_and_resumed, backend, stateful):
        for name, ((before, after, left), said) in found.items():
            if name in KEEPS:
                assert said == [], name
                assert left in (None, 1), name
                assert sorted(itertools.chain(*before, *after)) == sorted(set(itertools.chain(*before, *after))), name
                assert (len(before), len(after)) == (3, 1), name
            else:
                assert len(after) == 4, name
                assert len(said) == 2, name  # one of each run
                assert "checkpoint has no" in said[0], name
    assert "write itertools.islice(engine.batches(loader), n)" in found["islice"][1][0]


def of_ended_iterator(backend):
    def run():
        cfg = configured(backend)
        with prepare(cfg) as engine:
            it = engine.batches(iter([batch("mlp", my_rank(), 1)] * 3))
            return [len([engine.backward(engine(**each).loss) or engine.step() for each in it]) for _ in range(2)]

    return told(run)


def test_an_iterator_that_is_read_again_is_named():
    for counts, said in on_ranks(of_ended_iterator, "fsdp"):
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


def inside_a_window(backend):
    cfg, data = configured(backend, 2), rows()
    with prepare(cfg) as engine:
        it = iter(engine.batches(unishard.dataloader(data, cfg)))
        train(engine, [next(it)])
        return refused(next, engine.batches(unishard.dataloader(data, cfg)))


def one_after_the_other(backend):
    cfg, data = configured(backend), rows()

    def run():
        with prepare(cfg) as engine:
            for pair in zip(
                engine.batches(unishard.dataloader(data[:8], cfg)),
                engine.batches(unishard.dataloader(data[8:], cfg)),
                strict=True,
            ):
                train(engine, [pair[0]])
                train(engine, [pair[1]])
            return engine._batching.position()

    return told(run)


def left_by_an_error(backend):
    """The position after a loop that follows one which an error has left, and which is still held, as by a notebook."""
    cfg, data = configured(backend), rows()

    def run():
        with prepare(cfg) as engine:
            held = iter(engine.batches(unishard.dataloader(data[:8], cfg)))
            train(engine, [next(held)])
            next(held)
            train(engine, engine.batches(unishard.dataloader(data, cfg)), stop=2)
            return engine._batching.position()["state"]

    return told(run)


def test_a_second_training_loader_is_refused_or_named():
    played = play(((inside_a_window, ("fsdp",)), (one_after_the_other, ("fsdp",)), (left_by_an_error, ("fsdp",))))
    for where, said in values(played[left_by_an_error, ("fsdp",)]):
        assert (where["samples"], where["dataset_length"], said) == (8, 16, [])
    for said in values(played[inside_a_window, ("fsdp",)]):
        assert said.startswith(
            "ContractError: a loop over engine.batches() in training mode began inside an accumulation window"
        )
    for where, said in values(played[one_after_the_other, ("fsdp",)]):
        assert where is None
        assert len(said) == 1
        assert said[0].startswith(
            "two loops over engine.batches() are read in turn in training mode, so a checkpoint has no position"
        )


def counted(backend):
    """The samples of a metric over 14 of them on two ranks, by what is around the loader, and the warnings."""
    cfg, data = configured(backend), rows()[:-2]
    found = {}
    with prepare(cfg) as engine:
        engine.eval()
        for name, wrap in (("tqdm", quiet), ("generator", from_generator)):
            loader = wrap(unishard.dataloader(data, cfg, shuffle=False))
            found[name] = told(
                lambda loader=loader: sum(
                    len(engine.gather_for_metrics(each["row"])) for each in engine.batches(loader)
                )
            )
    return found


def test_a_metric_counts_each_sample_once_or_a_warning_says_that_it_does_not():
    for found in on_ranks(counted, "fsdp"):
        assert found["tqdm"] == (14, [])
        assert found["generator"][0] == 16
        (said,) = found["generator"][1]
        assert "engine.gather_for_metrics also counts the 2 samples that fill up the last batches" in said


# -- without engine.batches ------------------------------------------------------------------------


def outside(backend, how):
    """The warnings of loops that read their data past the engine, or seem to."""
    cfg, data = configured(backend), rows()

    def run():
        with prepare(cfg) as engine:
            loader = unishard.dataloader(data, cfg)
            if how == "ours":
                train(engine, loader)
            elif how == "theirs":
                train(engine, DataLoader(data, batch_size=2))
            elif how == "a look":
                train(engine, [next(iter(loader))])
                train(engine, engine.batches(loader))
            elif how == "own share":
                train(engine, [each | {"row": torch.zeros(1)} for each in shares()])
            else:
                for each in shares():
                    engine.eval()
                    for _ in unishard.dataloader(data, cfg):
                        engine(**shares()[0])
                    engine.train()
                    train(engine, [each | {"row": torch.zeros(1)}])

    return told(run)[1]


def shares():
    return everyones(0, 4, world=2)[my_rank() :: 2]


OUTSIDE = {
    "ours": ["a unishard.dataloader is read without engine.batches(), so"],
    "theirs": ["ranks 0 and 1 train on the same batches, so the other ranks add nothing; read the data with"],
    "a look": [],
    "own share": [],
    "evaluation": [],
}


@in_turn
def test_a_loop_without_engine_batches_is_named_once(backend):
    played = play(tuple((outside, (backend, how)) for how in OUTSIDE))
    for how, wanted in OUTSIDE.items():
        for said in values(played[outside, (backend, how)]):
            assert [text[: len(start)] for text, start in zip(said, wanted, strict=True)] == wanted, how
