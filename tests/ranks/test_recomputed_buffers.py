"""Units that write buffers in their forward and recompute it: each write happens once, and backward recomputes from what
the forward read, on both engines."""

from __future__ import annotations

import pytest
import torch
from harness import BACKENDS, EACH, config, heard, in_ranks, my_rank
from torch import nn
from torch.nn.utils import parametrizations

import unishard

WIDTH, SIZE = 6, 4


class Layer(nn.Module):
    """A residual block around what a subclass computes."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + 0.5 * torch.tanh(self.up(self.read(x)))

    def read(self, x):
        return x


class Normalized(Layer):
    """BatchNorm."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def read(self, x):
        return self.norm(x)


class Spectral(Layer):
    """Both spectral norms."""

    def __init__(self):
        super().__init__()
        self.up = parametrizations.spectral_norm(self.up)
        self.other = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def read(self, x):
        return self.other(x)


class Running(Layer):
    """A running mean, written in place or replaced, and a count; from the second forward on if it is late."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.tensor(0))

    def read(self, x):
        new = self.mean.lerp(x.detach().mean(0), 0.5)
        if self.how == "replaced":
            self.mean, self.count = new, self.count + 1
        elif self.how == "in place" or self.count > 0:
            self.mean.copy_(new)
            self.count.add_(1)
        else:
            self.count.add_(1)
        return x - self.mean


class Codebook(Layer):
    """A codebook of more than 64 KiB that is written through `data`, as many are."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(3000, WIDTH))
        self.register_buffer("table", torch.randn(3000, WIDTH))

    def read(self, x):
        nearest = torch.cdist(x.detach(), self.codes).argmin(1)
        read = x + self.codes[nearest] + self.table[:SIZE]
        self.codes.data[nearest] = self.codes[nearest].lerp(x.detach(), 0.4)
        return read


class Experts(Layer):
    """Counts of what two experts got, which decide who gets the next samples."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.register_buffer("tokens", torch.zeros(2, dtype=torch.int64))

    def read(self, x):
        first = x[:, 0] + 0.3 * (self.tokens[1] - self.tokens[0]) > 0
        self.tokens += torch.stack([first.sum(), (~first).sum()])
        return torch.where(first[:, None], self.experts[0](x), self.experts[1](x))


class Table(Layer):
    """A table that no forward writes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(WIDTH))

    def read(self, x):
        return x + self.table


class Late(Codebook):
    """A codebook that is written from the third micro-batch on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.tensor(0))

    def read(self, x):
        self.count.add_(1)
        if self.count > 2:
            self.codes[:SIZE].lerp_(x.detach(), 0.3)
        return x + self.codes[:SIZE]


class Stack(nn.Module):
    """Blocks, of which some run twice in a forward."""

    def __init__(self, blocks, twice=()):
        super().__init__()
        self.blocks, self.twice = nn.ModuleList(blocks), twice
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        for block in (*self.blocks, *(self.blocks[index] for index in self.twice)):
            x = block(x)
        return self.head(x).square().mean()


def trained(build, backend, strategy, **sections):
    """Losses, norms, and buffers after each update of two micro-batches."""
    torch.manual_seed(1)
    model, figures = build(), []
    units = sorted({type(block).__name__ for block in model.blocks})
    plain = {"training": {"gradient_accumulation_steps": 2}, "optimizer": {"name": "sgd", "lr": 0.05}}
    cfg = config(backend, {"strategy": strategy, "units": units}, **plain, **sections)
    with unishard.prepare(model, cfg) as engine:
        for micro_batch in range(6):
            generator = torch.Generator().manual_seed(2 * micro_batch + my_rank())
            loss = engine(torch.randn(SIZE, WIDTH, generator=generator) + 1)
            engine.backward(loss)
            figures.append({"loss": loss.item(), "norm": engine.step().grad_norm or 0.0})
            figures[-1] |= {name: buffer.double().norm().item() for name, buffer in engine.module.named_buffers()}
    return figures


def everything():
    """Each kind of block."""
    running = (Running("in place"), Running("replaced"), Running("later"))
    return Stack([Normalized(), Spectral(), *running, Codebook(), Experts()], twice=(0, 2, 6))


@in_ranks(
    cells=tuple((backend, strategy) for backend in BACKENDS for strategy in ("full_shard", "shard_grad_op")),
    in_turn=True,
)
def test_recomputation_writes_no_buffer_and_reads_what_the_forward_read(backend, strategy):
    """Bit for bit what training without recomputation gives."""
    wanted = trained(everything, backend, strategy)
    for asked in ("full", "selective", ["Normalized", "Running", "Codebook"]):
        assert trained(everything, backend, strategy, activation_checkpointing=asked) == wanted, asked


COMPILED = (("fsdp", "per_block"), ("fsdp", "full"), ("deepspeed", "per_block"))


@in_ranks(cells=COMPILED)
def test_a_compiled_unit_recomputes_from_the_right_buffers(backend, mode):
    """Units that write a buffer are not compiled; others are, such as those with a table."""

    def build():
        return Stack([Running("in place"), Experts(), Table()])

    wanted = trained(build, backend, "full_shard")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    sections = {"compile": {"mode": mode, "backend": "aot_eager"}, "activation_checkpointing": "full"}
    found = trained(build, backend, "full_shard", **sections)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert found == [pytest.approx(each, rel=1e-5) for each in wanted]


@in_ranks(cells=EACH, in_turn=True)
def test_a_large_buffer_that_is_first_written_later_is_reported_once(backend):
    """Only the micro-batch that writes it first recomputes from its new values; each writes it once."""

    def build():
        return Stack([Late(), Layer()])

    wanted = trained(build, backend, "full_shard")
    with heard() as lines:
        found = trained(build, backend, "full_shard", activation_checkpointing="full")
    told = "a forward of blocks.0 wrote the buffer codes for the first time, so the backward of this micro-batch"
    assert sum(told in line for line in lines) == 1
    assert found[:3] == wanted[:3]
    assert found[3:] == [pytest.approx(each, rel=0.1) for each in wanted[3:]]
