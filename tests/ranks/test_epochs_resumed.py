"""`resumed.epoch` of loaders that do not count epochs themselves: right, or None with a note."""

from __future__ import annotations

import pytest
import torch
from harness import DEEP, in_ranks, my_rank
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import unishard

EPOCHS, BATCHES = 3, 4
CELLS = (("fsdp", "full_shard"), ("deepspeed", "shard_grad_op"))
STOPS = {"in an epoch": 6, "after the last batch of one": 8, "before the first": 0}
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated", "ignore:.*has no load_state_dict")


def rows(count=2 * BATCHES):
    return [{"x": torch.full((4,), float(2 * row + my_rank()))} for row in range(count)]


def in_fixed_order(dataset, size):
    """A loader whose sampler is not of torch."""
    return DataLoader(dataset, size, sampler=[*range(len(dataset))])


def configured(backend, strategy, root):
    text = {"backend": backend, "sharding": strategy, "checkpoint": {"dir": root, "on_existing": "resume"}}
    quick = {"communication": {"desync_check": False}}
    return unishard.Config.model_validate(text | quick | {"training": {"micro_batch_size": 2}})


def read(cfg, loaders, stop=None):
    """Trains until the end, or saves after so many updates; what was read in each epoch, and where it began."""
    seen = []
    with unishard.prepare(torch.nn.Linear(4, 1), cfg) as engine:
        first = engine.resumed.epoch if engine.resumed else 0
        notes = engine.resumed.notes if engine.resumed else ()
        if stop == 0:
            engine.save()
            return [], 0, ()
        for epoch in range(first or 0, EPOCHS):
            for loader in loaders:
                for batch in engine.batches(loader() if callable(loader) else loader):
                    seen.append((epoch, batch["x"][0, 0].item()))
                    engine.backward(engine(batch["x"]).square().mean())
                    engine.step()
                    if len(seen) == stop:
                        engine.save()
                        return seen, first, notes
    return seen, first, notes


@in_ranks(cells=CELLS if DEEP else CELLS[1:])
def test_an_epoch_is_counted_where_its_loader_does_not_count_it(backend, strategy, root):
    whole, *_ = read(configured(backend, strategy, f"{root}/whole"), [DataLoader(rows(), 2)])
    assert len(whole) == EPOCHS * BATCHES
    for kind in (StatefulDataLoader, DataLoader, in_fixed_order):
        for when, stop in STOPS.items():
            cfg = configured(backend, strategy, f"{root}/{kind.__name__}-{when}")
            assert read(cfg, [kind(rows(), 2)], stop)[1:] == (0, ())
            rest, first, notes = read(cfg, [kind(rows(), 2)])
            begun = stop // BATCHES * BATCHES if kind is in_fixed_order else stop
            assert (first, rest) == (stop // BATCHES, whole[begun:])
            said = [
                note
                for note in notes
                if "batches of an epoch had been read, and no position in the data was saved" in note
            ]
            assert bool(said) == (kind is in_fixed_order and stop % BATCHES > 0)


@in_ranks(cells=CELLS[:1])
def test_an_epoch_that_cannot_be_counted_is_none_and_said(backend, strategy, root):
    one, other = rows(), rows(2)
    several = {
        "two data sets": [StatefulDataLoader(one, 2), StatefulDataLoader(other, 2)],
        "new data": [lambda: StatefulDataLoader(rows(), 2)],
    }
    for name, loaders in several.items():
        cfg = configured(backend, strategy, f"{root}/{name}")
        read(cfg, loaders, stop=BATCHES + 2)
        with unishard.prepare(torch.nn.Linear(4, 1), cfg) as engine:
            assert engine.resumed.epoch is None
            assert engine.resumed.notes == (
                "the epoch of the StatefulDataLoader is unknown, so `epoch` is None; count epochs in the loop, and save "
                "the number: engine.save(state={'epoch': epoch})",
            )
            assert engine.load("latest", data=False).epoch == 0
