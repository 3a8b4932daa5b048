"""Buffers that each rank changes by its own data: what evaluation and checkpoints read is the same on every rank, on
both engines."""

from __future__ import annotations

import shutil
import tempfile

import pytest
import torch
import torch.distributed as dist
from harness import BACKENDS, STRATEGIES, config, heard, my_rank, play, values
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


def cfg_of(backend, strategy, how, **sections):
    training = {} if how is None else {"buffers": how}
    return config(backend, strategy, training=training, **sections)


def evaluated(backend, strategy, how):
    """The ranks' own buffers, what evaluation reads, and what a load restores; and a loss of each on one batch."""
    box = [tempfile.mkdtemp() if my_rank() == 0 else None]
    with unishard.prepare(built(), cfg_of(backend, strategy, how)) as engine:
        dist.broadcast_object_list(box)
        own = of_all_ranks(trained(engine))
        engine.eval()
        loss = float(engine(**samples(99)).loss)
        read = buffers(engine)
        engine.train()
        engine.save(box[0])
    with unishard.prepare(built(), cfg_of(backend, strategy, how)) as engine:
        engine.load(box[0])
        engine.eval()
        loaded, again = buffers(engine), float(engine(**samples(99)).loss)
        dist.barrier()
    if my_rank() == 0:
        shutil.rmtree(box[0])
    return own, read, loaded, (loss, again)


CELLS = (
    *((backend, strategy, None) for backend in BACKENDS for strategy in STRATEGIES),
    *((backend, "full_shard", how) for backend in BACKENDS for how in ("rank0", "local")),
)


def named(cell):
    return "-".join(map(str, cell))


def played(function, *arguments):
    """What every rank returned."""
    beside = tuple((each, (backend,)) for each in (read_within_a_window, costs) for backend in BACKENDS)
    return values(play((*((evaluated, cell) for cell in CELLS), *beside))[function, arguments])


@pytest.mark.parametrize("cell", CELLS, ids=named)
def test_evaluation_and_checkpoint_read_the_same_buffers_on_every_rank(cell):
    how = cell[2] or "sync"
    for rank, (own, read, loaded, (loss, again)) in enumerate(played(evaluated, *cell)):
        assert not torch.equal(own[0]["norm.running_mean"], own[1]["norm.running_mean"])
        for name, found in read.items():
            mine, first = own[rank][name], own[0][name]
            if how == "local" or name == "cache":
                right = mine
            elif how == "rank0" or not found.is_floating_point():
                right = first
            else:
                right = torch.stack([each[name].float() for each in own]).mean(0).to(found.dtype)
            torch.testing.assert_close(found, right, rtol=1e-6, atol=0)
            if name != "cache":
                assert torch.equal(loaded[name], first if how == "local" else found), name
        if how != "local":
            assert loss == again


def read_within_a_window(backend):
    """A window that an evaluation interrupts between forward and backward, and one that nothing does; then what a save
    reads."""
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
                box = [tempfile.mkdtemp() if my_rank() == 0 else None]
                dist.broadcast_object_list(box)
                engine.save(box[0])
                read = of_all_ranks(engine.module.norm.running_mean.tolist())
                dist.barrier()
                if my_rank() == 0:
                    shutil.rmtree(box[0])
    return losses, read


def costs(backend):
    """What collectives move: at the first evaluation, at the next without training between them, and without buffers;
    and the log."""
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
    moved = {
        phase: [(event.kind, event.numel, event.dtype) for event in recorder.events if event.phase == phase]
        for phase in ("first", "second", "none")
    }
    return moved, lines


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_evaluation_between_forward_and_backward_leaves_the_window_as_it_is(backend):
    for (interrupted, whole), read in played(read_within_a_window, backend):
        assert interrupted == pytest.approx(whole, rel=1e-6)
        assert read[0] == read[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_buffers_that_differ_are_sent(backend):
    persistent, floats, integers = 6, (6 + 6, 3), 1  # BatchNorm's two, `level`; `highest`
    hashes = ("all_reduce", 2 * persistent, "int64")
    for sent, _ in played(costs, backend):
        assert sent["none"] == []
        assert sent["second"] == [hashes]
        assert sorted(sent["first"]) == sorted(
            [
                hashes,
                ("all_reduce", floats[0], "float32"),
                ("all_reduce", floats[1], "float32"),
                ("broadcast", 8 * integers, "uint8"),
            ]
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_prepare_names_the_batch_norm_that_normalizes_over_all_ranks(backend):
    (_, first), (_, second) = played(costs, backend)
    assert [
        line
        for line in first
        if "Tracked normalizes by each rank's own micro-batch in 1 BatchNorm modules (norm)" in line
    ]
    assert sum("SyncBatchNorm" in line for line in first) == 1
    assert not any("SyncBatchNorm" in line for line in second)
