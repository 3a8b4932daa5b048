"""Buffers that each rank changes by its own data: what evaluation and checkpoints read is the same on every rank, on
both engines."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import BACKENDS, EACH, STRATEGIES, config, heard, in_ranks, my_rank
from recording import Countable, Recorder
from torch import nn
from torch.nn import functional

import unishard
from unishard.testing.models import MlpOutput

WORLD = 2
SIZE = 4


class Tracked(nn.Module):
    """BatchNorm, and beside it what else modules keep in buffers."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 3)
        self.register_buffer("level", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("highest", torch.tensor(0, dtype=torch.int64))
        self.register_buffer("table", torch.linspace(-1, 1, 6))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x, labels):
        hidden = functional.relu(self.norm(self.body(x)) + self.table.to(x.dtype))
        logits = self.head(hidden)
        if self.training:
            self.level.lerp_(logits.detach().mean(0).to(self.level.dtype), 0.5)
            self.highest.fill_(int(labels.max()) + 10 * my_rank())
            self.cache.fill_(my_rank())
        else:
            logits = logits + self.level
        return MlpOutput(functional.cross_entropy(logits.float(), labels), logits)


def built():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Tracked()


def samples(seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": scale * torch.randn(SIZE, 5, generator=generator) + scale,
        "labels": torch.randint(3, (SIZE,), generator=generator),
    }


def trained(engine, updates=3):
    """Updates on data of the rank's own, and its buffers after them."""
    for update in range(updates):
        engine.backward(engine(**samples(10 * update + my_rank(), 1.0 + my_rank())).loss)
        engine.step()
    return buffers(engine)


def buffers(engine):
    return {name: buffer.detach().clone() for name, buffer in engine.module.named_buffers()}


def of_all_ranks(found):
    everyone = [None] * WORLD
    dist.all_gather_object(everyone, found)
    return everyone


CELLS = (
    *((backend, strategy, None) for backend in BACKENDS for strategy in STRATEGIES),
    *((backend, "full_shard", how) for backend in BACKENDS for how in ("rank0", "local")),
)


@in_ranks(cells=CELLS)
def test_evaluation_and_checkpoint_read_the_same_buffers_on_every_rank(backend, strategy, how, root):
    """The ranks' own buffers, what evaluation reads, and what a load restores; and a loss of each on one batch."""
    cfg = config(backend, strategy, training={} if how is None else {"buffers": how})
    folder = f"{root}/{backend}-{strategy}-{how}"
    with unishard.prepare(built(), cfg) as engine:
        own = of_all_ranks(trained(engine))
        engine.eval()
        loss = float(engine(**samples(99)).loss)
        read = buffers(engine)
        engine.train()
        engine.save(folder)
    with unishard.prepare(built(), cfg) as engine:
        engine.load(folder)
        engine.eval()
        loaded, again = buffers(engine), float(engine(**samples(99)).loss)
    assert not torch.equal(own[0]["norm.running_mean"], own[1]["norm.running_mean"])
    for name, found in read.items():
        mine, first = own[my_rank()][name], own[0][name]
        if how == "local" or name == "cache":
            right = mine
        elif how == "rank0" or not found.is_floating_point():
            right = first
        else:
            right = torch.stack([each[name].float() for each in own]).mean(0).to(found.dtype)
        torch.testing.assert_close(found, right, rtol=1e-6, atol=0)
        if name != "cache":
            assert torch.equal(loaded[name], first if how == "local" else found), name
    assert how == "local" or loss == again


@in_ranks(cells=EACH)
def test_an_evaluation_between_forward_and_backward_leaves_the_window_as_it_is(backend, root):
    """A window that an evaluation interrupts, and one that nothing does; then what a save reads."""
    losses = []
    for interrupted in (True, False):
        with unishard.prepare(built(), config(backend, training={"gradient_accumulation_steps": 2})) as engine:
            for turn in range(4):
                loss = engine(**samples(turn + 10 * my_rank())).loss
                if interrupted and turn == 2:
                    engine.eval()
                    engine(**samples(99))
                    engine.train()
                engine.backward(loss)
                step = engine.step()
            losses.append((step.grad_norm, engine.mean(loss)))
            if interrupted:
                engine.save(f"{root}/{backend}-window")
                read = of_all_ranks(engine.module.norm.running_mean.tolist())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert read[0] == read[1]


@in_ranks(cells=EACH)
def test_only_buffers_that_differ_are_sent_and_prepare_names_the_batch_norm(backend):
    """That normalizes over all ranks, on rank 0: at the first evaluation, at the next without training between them,
    and without buffers."""
    with heard() as lines:
        recorder = Recorder()
        engines = [unishard.prepare(model, config(backend, "no_shard")) for model in (built(), Countable())]
    trained(engines[0])
    with recorder:
        for recorder.phase, engine in (("first", engines[0]), ("second", engines[0]), ("none", engines[1])):
            engine.eval()
            engine.train()
    for engine in engines:
        engine.close()
    sent = {
        phase: [(event.kind, event.numel, event.dtype) for event in recorder.events if event.phase == phase]
        for phase in ("first", "second", "none")
    }
    persistent, integers = 6, 1  # BatchNorm's two, `level`; `highest`
    hashes = ("all_reduce", 2 * persistent, "int64")
    floats = [("all_reduce", 6 + 6, "float32"), ("all_reduce", 3, "float32")]
    assert sent["none"] == []
    assert sent["second"] == [hashes]
    assert sorted(sent["first"]) == sorted([hashes, *floats, ("broadcast", 8 * integers, "uint8")])
    named = "Tracked normalizes by each rank's own micro-batch in 1 BatchNorm modules (norm)"
    assert my_rank() or any(named in line for line in lines)
    assert sum("SyncBatchNorm" in line for line in lines) == (0 if my_rank() else 1)
