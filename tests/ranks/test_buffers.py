"""Buffers that each rank changes by its own data: what evaluation and checkpoints read is the same on every rank, on
both engines."""

from __future__ import annotations

import pytest
import torch
from harness import BACKENDS, EACH, PAIRS, config, heard, in_ranks, my_rank, of_all_ranks
from safetensors import safe_open
from torch import nn
from torch.nn import functional

import unishard
from dev.ranks.recording import Countable, Recorder
from unishard.testing.models import MlpOutput
from unishard.testing.ranks import run_ranks

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


CELLS = (
    *((*pair, None) for pair in PAIRS),
    *((backend, "full_shard", how) for backend in BACKENDS for how in ("rank0", "local")),
)


@in_ranks(cells=CELLS)
def test_evaluation_and_checkpoint_read_the_same_buffers_on_every_rank(backend, strategy, how, root):
    """The ranks' own buffers, what evaluation reads, and what a load restores; and a loss of each on one batch."""
    cfg = config(backend, strategy, training={} if how is None else {"buffers": how})
    with unishard.prepare(built(), cfg) as engine:
        own = of_all_ranks(trained(engine))
        engine.eval()
        loss = float(engine(**samples(99)).loss)
        read = buffers(engine)
        engine.train()
        engine.save(root)
    with unishard.prepare(built(), cfg) as engine:
        engine.load(root)
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
            assert torch.equal(loaded[name], found), name
    assert loss == again


@in_ranks(cells=EACH, in_turn=True)
def test_an_evaluation_between_forward_and_backward_leaves_the_window_as_it_is(backend):
    """A window that an evaluation interrupts, and one that nothing does."""
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
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@in_ranks(cells=EACH, in_turn=True)
def test_only_buffers_that_differ_are_sent_and_prepare_names_the_batch_norm(backend):
    """That normalizes over all ranks, on rank 0: at the first evaluation, at the next without training between them,
    and without buffers."""
    with heard() as lines:
        recorder = Recorder()
        engines = [unishard.prepare(model, config(backend, "no_shard")) for model in (built(), Countable())]
    trained(engines[0])
    with recorder, heard() as merged_lines:
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
    assert sum("buffers that differ between ranks are merged" in line for line in merged_lines) == (
        0 if my_rank() else 1
    )
    assert my_rank() or any("highest (rank0), level (mean); if that is wrong" in line for line in merged_lines)
    assert sorted(sent["first"]) == sorted([hashes, *floats, ("broadcast", 8 * integers, "uint8")])
    named = "Tracked normalizes by each rank's own micro-batch in 1 BatchNorm modules (norm)"
    assert my_rank() or any(named in line for line in lines)
    assert sum("SyncBatchNorm" in line for line in lines) == (0 if my_rank() else 1)


class Observed(nn.Module):
    """What each rank has seen: the range, and how many samples of two kinds; both are read in the next forward."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 3)
        self.register_buffer("lowest", torch.tensor(torch.inf))
        self.register_buffer("highest", torch.tensor(-torch.inf))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("weight", torch.zeros(1))
        self.register_buffer("ready", torch.tensor(False))
        self.register_buffer("rank", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x, labels):
        if self.training:
            self.lowest.copy_(torch.minimum(self.lowest, x.min()))
            self.highest.copy_(torch.maximum(self.highest, x.max()))
            self.seen += torch.stack([(labels == 0).sum(), (labels > 0).sum()])
            self.weight += x.detach().abs().sum()
            self.ready.fill_(my_rank() == 1)
            self.rank.fill_(my_rank())
            self.mean.lerp_(x.mean(0), 0.3)
        scale = (self.highest - self.lowest) * (1 + 0.01 * self.seen[0])
        return MlpOutput(functional.cross_entropy(self.body((x - self.mean) / scale), labels), None)


WAYS = {
    "^lowest": "min",
    "^highest|^ready": "max",
    "^(seen|weight)$": "sum",
    "^rank": "local",
}


def observed():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return Observed()


def global_figures(updates):
    """What one process that sees the data of all ranks would have."""
    batches = [samples(10 * update + rank, 1.0 + rank) for update in range(updates) for rank in range(WORLD)]
    labels = torch.cat([each["labels"] for each in batches])
    return {
        "lowest": min(each["x"].min().item() for each in batches),
        "highest": max(each["x"].max().item() for each in batches),
        "seen": [int((labels == 0).sum()), int((labels > 0).sum())],
        "weight": sum(each["x"].abs().sum().item() for each in batches),
        "ready": True,
    }


def steps(engine, first, count):
    """Losses of updates on data of the rank's own."""
    losses = []
    for update in range(first, first + count):
        loss = engine(**samples(10 * update + my_rank(), 1.0 + my_rank())).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def check_merged(found, updates, rank):
    right = global_figures(updates)
    assert [round(value, 4) for value in (found["lowest"].item(), found["highest"].item())] == pytest.approx(
        [right["lowest"], right["highest"]], rel=1e-4
    )
    assert found["seen"].tolist() == right["seen"]
    assert found["weight"].item() == pytest.approx(right["weight"], rel=1e-5)
    assert found["ready"].item() is True
    assert found["rank"].item() == rank


@in_ranks(
    cells=tuple((backend, strategy) for backend in BACKENDS for strategy in ("full_shard", "shard_grad_op")),
    in_turn=True,
)
def test_a_merge_gives_what_one_process_has_that_sees_all_data(backend, strategy):
    """At each of two evaluations, the second of which counts only what came after the first."""
    with unishard.prepare(observed(), config(backend, strategy, training={"buffers": WAYS})) as engine:
        steps(engine, 0, 2)
        for updates in (2, 4):
            engine.eval()
            check_merged(buffers(engine), updates, my_rank())
            engine.train()
            steps(engine, updates, 2)


@in_ranks(
    cells=tuple((backend, strategy) for backend in BACKENDS for strategy in ("full_shard", "shard_grad_op")),
    in_turn=True,
)
def test_a_save_and_an_export_change_no_training_and_a_resumed_run_goes_on_as_if_nothing_happened(
    backend, strategy, root
):
    """Losses and buffers bit for bit, and what the second merge counts."""
    cfg = config(backend, strategy, training={"buffers": WAYS})
    runs = []
    for saves in (False, True):
        with unishard.prepare(observed(), cfg) as engine:
            steps(engine, 0, 2)
            engine.eval()
            engine.train()
            steps(engine, 2, 1)
            if saves:
                engine.save(root)
                engine.export(f"{root}-exported")
            runs.append((steps(engine, 3, 2), buffers(engine)))
    with unishard.prepare(observed(), cfg) as engine:
        engine.load(root)
        runs.append((steps(engine, 3, 2), buffers(engine)))
        engine.eval()
        check_merged(buffers(engine), 5, my_rank())
    for losses, left in runs[1:]:
        assert losses == runs[0][0]
        assert all(torch.equal(left[name], value) for name, value in runs[0][1].items())
    with safe_open(f"{root}-exported/model.safetensors", "pt") as file:
        check_merged({name: file.get_tensor(name) for name in file.keys()}, 3, 0)  # noqa: SIM118


def saved_by_two(root):
    with unishard.prepare(observed(), config("fsdp", training={"buffers": WAYS})) as engine:
        steps(engine, 0, 3)
        engine.save(root)


def loaded_by_one(backend, root):
    with unishard.prepare(observed(), config(backend, "no_shard", training={"buffers": WAYS})) as engine:
        engine.load(root)
        return buffers(engine)


def test_another_number_of_ranks_resumes_from_the_merged_buffers(tmp_path):
    run_ranks(2, saved_by_two, str(tmp_path))
    for backend in BACKENDS:
        (found,) = run_ranks(1, loaded_by_one, backend, str(tmp_path))
        check_merged(found, 3, 0)
