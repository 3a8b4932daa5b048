"""`engine.load` inside a loop over `engine.batches`: the loop goes back to the position of the checkpoint."""

from __future__ import annotations

import pytest
import torch
from harness import EACH, checked, in_ranks, my_rank, refused
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import unishard

SAMPLES = [{"x": torch.full((4,), index / 40), "index": index} for index in range(40)]
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def distributed(cfg):
    return DataLoader(SAMPLES, batch_size=2, sampler=DistributedSampler(SAMPLES))


LOADERS = {
    "unishard": lambda cfg: unishard.dataloader(SAMPLES, cfg),
    "torch": distributed,
    "torchdata": lambda cfg: StatefulDataLoader(SAMPLES[my_rank() :: 2], 2, shuffle=True),
}
LOOPS = {
    "batches": lambda engine, loader: engine.batches(loader),
    "windows": lambda engine, loader: (batch for window in engine.windows(loader) for batch in window),
}


def trained(engine, loop, root=None, saved_after=2, **load):
    """Two epochs of samples; with `root` it goes back once, from 4 updates to what was saved after two of them."""
    torch.manual_seed(0)
    seen, saved, goes_back = [], None, root is not None
    for _ in range(2):
        for batch in loop():
            seen.append(batch["index"].tolist())
            engine.backward(engine(batch["x"]).square().mean())
            updates = len(seen) // 2 if engine.step().updated else 0
            if goes_back and updates == saved_after:
                saved = engine.save(root)
            if goes_back and updates == 4:
                goes_back = False
                engine.load(saved, **load)
    with engine.weights.gathered(["weight", "bias"]) as full:
        return seen, [full["weight"].tolist(), full["bias"].tolist()]


def prepared(backend):
    cfg = checked(backend, training={"micro_batch_size": 2, "gradient_accumulation_steps": 2})
    torch.manual_seed(0)
    return cfg, unishard.prepare(torch.nn.Linear(4, 1), cfg)


@in_ranks(cells=EACH, in_turn=True)
def test_a_loop_goes_back_with_the_weights(backend, root):
    found = {}
    for kind, name in (*((kind, "batches") for kind in LOADERS), ("unishard", "windows")):
        found[kind, name] = []
        for folder in (None, f"{root}/{kind}-{name}"):
            cfg, engine = prepared(backend)
            with engine:
                loader = LOADERS[kind](cfg)
                found[kind, name].append(trained(engine, lambda: LOOPS[name](engine, loader), folder))  # noqa: B023
    for case, ((whole, weights), (seen, after)) in found.items():
        assert seen == [*whole[:8], *whole[4:]], case
        assert after == weights, case


@in_ranks(cells=EACH, in_turn=True)
def test_a_loop_goes_on_where_it_is_if_asked_to(backend, root):
    found = {}
    for kind, batches in {"list": list(LOADERS["torch"](None)), "unishard": None}.items():
        cfg, engine = prepared(backend)
        with engine:
            loader = batches or LOADERS["unishard"](cfg)
            found[kind] = trained(engine, lambda: engine.batches(loader), f"{root}/{kind}", data=False)[0]  # noqa: B023
            position = engine._batching.position()
    assert found["list"] == 2 * [batch["index"].tolist() for batch in LOADERS["torch"](None)]
    assert len(found["unishard"]) == 20
    assert position["state"]["epoch"] == 2, "a checkpoint still has the position of the loop"


@in_ranks(cells=EACH, in_turn=True)
def test_a_loop_that_cannot_go_back_says_so(backend, root):
    batches = list(LOADERS["torch"](None))
    loops = {
        "list has no load_state_dict": lambda engine, cfg: engine.batches(batches),
        "generator has no load_state_dict": lambda engine, cfg: engine.batches(batch for batch in batches),
        "its `lengths` do not go back": lambda engine, cfg: (
            batch for window in engine.windows(distributed(cfg), lengths=[2] * 5) for batch in window
        ),
        "another one was open": lambda engine, cfg: (
            batch
            for both in zip(engine.batches(distributed(cfg)), engine.batches(distributed(cfg)), strict=True)
            for batch in both
        ),
    }
    said = {}
    for number, (why, loop) in enumerate(loops.items()):
        cfg, engine = prepared(backend)
        with engine:
            said[why] = refused(trained, engine, lambda: loop(engine, cfg), f"{root}/{number}")  # noqa: B023
    for why, text in said.items():
        assert f"engine.load was called inside this loop over engine.batches(), and {why}" in text
        assert "write `break` after the load and begin a new loop, or write engine.load(..., data=False)" in text
