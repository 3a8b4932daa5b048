"""Models whose data only rank 0 has before `prepare`, and what loading costs in host memory."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from functools import cache
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist
from harness import BACKENDS, DEEP, EACH, SPANNING, config, in_ranks, my_rank, own_share, train
from torch import nn

import unishard
from unishard.failures import lifetime
from unishard.testing import run_ranks
from unishard.testing.models import Mlp, llama, mlp


class Awkward(Mlp):
    """A parameter that two modules take, one that is set twice, a buffer that is computed, and a constructor that
    computes."""

    def __init__(self):
        super().__init__()
        shared = nn.Parameter(torch.randn(23, 23))
        self.left, self.right = nn.Linear(23, 23, bias=False), nn.Linear(23, 23, bias=False)
        self.left.weight = self.right.weight = shared
        self.register_buffer("steps", torch.linspace(0, 1, 4), persistent=False)
        self.rates = [step.item() for step in self.steps]
        self.head = nn.Linear(23, 11)

    def forward(self, x, labels):
        out = super().forward(x, labels)
        return out._replace(loss=out.loss + self.rates[-1] * (self.left.weight @ self.right.weight).square().mean())


def awkward():
    torch.manual_seed(8)
    return Awkward()


MODELS = {"mlp": mlp, "llama": lambda: llama(tie_word_embeddings=True), "awkward": awkward}


CELLS = (
    *((*cell, "mlp") for cell in SPANNING),
    *((*cell, "llama") for cell in SPANNING if cell[1] == "full_shard" and (DEEP or cell[0] == "fsdp")),
    *((backend, "full_shard", "bf16", "awkward") for backend in BACKENDS if DEEP or backend == "deepspeed"),
)


@in_ranks(cells=CELLS)
def test_a_model_built_inside_is_bit_for_bit_that_built_outside(backend, strategy, precision, name):
    """Losses and norms, where its data was, and whether its ties hold."""
    curves, data = [], "llama" if name == "llama" else "mlp"
    cfg = config(backend, strategy, precision=precision)
    for inside in (False, True):
        with unishard.init(cfg) if inside else contextlib.nullcontext():
            model = MODELS[name]()
        devices = [
            {tensor.device.type for tensor in tensors} for tensors in (list(model.parameters()), list(model.buffers()))
        ]
        with unishard.prepare(model, cfg) as engine:
            curves.append([(loss, step.grad_norm) for loss, step in train(engine, own_share(3, data))])
            if name == "awkward":
                assert engine.module.left.weight is engine.module.right.weight
    assert curves[0] == curves[1]
    assert devices == [{"meta" if my_rank() else "cpu"}, {"cpu"}]


@in_ranks(cells=EACH)
def test_several_models_in_any_order(backend):
    """Built in one context, prepared in the other order, one of them not trained."""
    cfg = config(backend)
    with unishard.init(cfg):
        first, second = mlp(), mlp(seed=9)
    with unishard.prepare(second, cfg, train=False) as judge, unishard.prepare(first, cfg) as engine:
        batch = own_share(1)[0]
        same = torch.equal(judge(**batch).logits, mlp(seed=9)(**batch).logits)
        trained = train(engine, own_share(2))
    assert same
    assert len(trained) == 2


class Reading(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = self.linear.weight.abs().max().item()


@in_ranks(cells=(("fsdp",),))
def test_a_constructor_that_reads_its_parameters_is_told_of(backend):
    if my_rank() == 0:
        with unishard.init(config(backend)):
            Reading()
    else:
        with pytest.raises(RuntimeError, match="only rank 0 has parameter data"), unishard.init(config(backend)):
            Reading()


# -- host memory -----------------------------------------------------------------------------------

WIDTH, BLOCKS = 1024, 50
MODEL_BYTES = 4 * BLOCKS * WIDTH * WIDTH


class Large(nn.Module):
    """200 MiB in 25 units of two matrices."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
            for _ in range(BLOCKS // 2)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


_kept: list[TemporaryDirectory] = []


@cache
def large_llama():
    """A folder with a model of about 200 MiB in four files, and its bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "vocab_size": 128,
    }
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    where = TemporaryDirectory()
    _kept.append(where)
    model.save_pretrained(where.name, max_shard_size="50MB")
    return where.name, 4 * sum(parameter.numel() for parameter in model.parameters())


def loaded(cfg, path):
    from transformers import LlamaForCausalLM

    return unishard.from_pretrained(LlamaForCausalLM, path, cfg)


def inside(cfg):
    with unishard.init(cfg):
        return Large()


def outside(cfg):
    return Large()


def held():
    """Bytes of this process that are no file's."""
    with open("/proc/self/status") as lines:
        return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))


def memory(backend, build, trained, *arguments):
    """What this rank holds beyond what it held before, by time, while a model is built and prepared."""
    from transformers import LlamaForCausalLM  # code is no part of the model

    assert LlamaForCausalLM
    cfg = config(backend, optimizer={"name": "sgd", "lr": 0.1}, communication={"reduce_bucket_size": 2_000_000})
    lifetime.ensure(unishard.Topology.from_environment())
    with unishard.prepare(nn.Linear(4, 4), cfg):
        gc.collect()
    dist.barrier()
    base, samples, done = held(), [], threading.Event()

    def watch():
        while not done.is_set():
            samples.append((time.time(), held() - base))
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = build(cfg, *arguments)
    dist.barrier()  # else one rank could be done before the other begins
    engine = unishard.prepare(model, cfg, train=trained)
    dist.barrier()
    done.set()
    watcher.join()
    samples.append((time.time(), held() - base))
    engine.close()
    return samples


def peak_of_all(samples, model_bytes=MODEL_BYTES):
    """The most that all ranks held together at one time, in models."""
    now, most = [0] * len(samples), 0
    for _, rank, value in sorted((at, rank, value) for rank, each in enumerate(samples) for at, value in each):
        now[rank] = value
        most = max(most, sum(now))
    return most / model_bytes


HELD = [("fsdp", True), pytest.param("fsdp", False, marks=pytest.mark.deep), ("deepspeed", False)]


@pytest.mark.parametrize(("backend", "trained"), HELD)
def test_all_ranks_together_hold_the_model_once_while_it_is_loaded(backend, trained, record_property):
    samples = run_ranks(2, memory, backend, inside, trained, timeout=120)
    record_property("peak host memory over all ranks, in models", peak_of_all(samples))
    assert peak_of_all(samples) <= 1.2
    assert max(value for _, value in samples[1]) / MODEL_BYTES <= 0.6


@pytest.mark.parametrize(("backend", "trained"), HELD)
def test_all_ranks_together_hold_a_pretrained_model_once_while_it_is_read(backend, trained, record_property):
    path, size = large_llama()
    samples = run_ranks(2, memory, backend, loaded, trained, path, timeout=120)
    record_property("peak host memory over all ranks, in models", peak_of_all(samples, size))
    assert peak_of_all(samples, size) <= 1.2


def test_deepspeed_holds_no_more_while_it_loads_than_it_trains_with():
    samples = run_ranks(2, memory, "deepspeed", inside, True, timeout=120)
    assert peak_of_all(samples) <= sum(each[-1][1] for each in samples) / MODEL_BYTES + 0.2


def test_without_init_each_rank_holds_a_model():
    assert peak_of_all(run_ranks(2, memory, "fsdp", outside, True, timeout=120)) > 1.9
