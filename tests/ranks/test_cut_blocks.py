"""A model that computes something else when it is cut is refused before its first update."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from harness import config, in_ranks, refused
from torch import nn
from torch.nn import functional

import unishard

PLAN = {f"layers.*.{each}": "colwise" for each in "qkv"} | {"layers.*.out": "rowwise"}
COMPILED = "compile={mode: per_block, backend: aot_eager}"
OUTPUT = "parallel.tensor: layers.0 (Layer) is not the same when it is cut: its output is another one; take the number"

FAILS = (
    "the model fails where each rank has a part of its weights: RuntimeError: The size of tensor a (8) must match the "
    "size of tensor b (16) at non-singleton dimension 2, in layers.0 (Layer); if it runs without parallel.tensor, "
)


class Layer(nn.Module):
    """Attention that computes as `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.config, self.drop = kind, SimpleNamespace(heads=4), nn.Dropout(0.5)
        if kind != "heads of a config":
            self.num_heads = 4
        self.q, self.k, self.v, self.gate = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.out = nn.Linear(16, 16)
        if kind == "zeros":
            nn.init.zeros_(self.out.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        heads = getattr(self, "num_heads", self.config.heads)
        q, k, v = (each(hidden).unflatten(-1, (heads, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        if self.kind in ("norm", "zeros"):
            mixed = functional.layer_norm(mixed, mixed.shape[-1:])
        if self.kind == "whole gate":
            mixed = mixed * self.gate(hidden)
        if self.kind == "gate":
            mixed = mixed * self.gate(hidden).mean(-1, keepdim=True)
        return hidden + self.drop(self.out(mixed))


class Layers(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList([Layer(kind), Layer(kind)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


@in_ranks(
    cells=(
        ("fsdp", "heads of a config", "precision=fp32", OUTPUT),
        ("deepspeed", "heads of a config", "precision=bf16", OUTPUT),
        ("deepspeed", "norm", COMPILED, OUTPUT),
        ("fsdp", "zeros", "precision=bf16", OUTPUT),
        ("fsdp", "gate", COMPILED, "layers.0.gate has whole weights, and each rank has a part of their gradients; add"),
    )
)
def test_a_block_that_is_another_one_when_it_is_cut(backend, kind, field, expected):
    """Also where results are zero at first, in 16 bits, and where blocks are compiled."""
    cfg = config(backend, parallel={"tensor": {"size": 2, "plan": PLAN}}).override(field)
    with unishard.prepare(Layers(kind), cfg) as engine:
        engine.backward(engine(torch.arange(8).view(2, 4)).square().mean())
        assert expected in refused(engine.step)


@in_ranks(cells=(("fsdp",), ("deepspeed",)), in_turn=True)
def test_a_block_that_fails_when_it_is_cut(backend):
    cfg = config(backend, parallel={"tensor": {"size": 2, "plan": PLAN}})
    with unishard.prepare(Layers("whole gate"), cfg) as engine:
        assert FAILS in refused(engine, torch.arange(8).view(2, 4))


@in_ranks(cells=(("fsdp", "heads of a config"), ("deepspeed", "norm")))
def test_before_anything_was_trained(backend, kind):
    cfg = config(backend, parallel={"tensor": {"size": 2, "plan": PLAN}})
    with unishard.prepare(Layers(kind), cfg, train=False) as engine:
        assert OUTPUT in refused(engine, torch.arange(8).view(2, 4))


@in_ranks(cells=(("fsdp", "bf16"), ("deepspeed", "fp32")))
def test_the_proof_changes_nothing(backend, precision, monkeypatch):
    """No random number, so that dropout goes on as without it, and no weight."""

    def run() -> list[float]:
        torch.manual_seed(1)
        cfg = config(backend, precision=precision, parallel={"tensor": {"size": 2, "plan": PLAN}})
        losses = []
        with unishard.prepare(Layers("right"), cfg) as engine:
            for _ in range(3):
                losses.append(loss := engine(torch.arange(8).view(2, 4)).square().mean())
                engine.backward(loss)
                engine.step()
        return [each.item() for each in losses]

    with_proof = run()
    monkeypatch.setattr("unishard.parallel.tensor.block_proof.BlockProof.prove", lambda proof: None)
    assert run() == with_proof
