"""Activation checkpointing and compilation: what runs twice, what is kept, what is told, on both engines."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import curve, in_ranks, own_share, play, prepare, refused, train, values
from harness.training import DEEP, EACH, FEWER, config
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import unishard
from unishard.testing.models import MODELS


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def word(asked):
    """As a config writes it; scenarios need arguments that can be hashed."""
    return list(asked) if isinstance(asked, tuple) else asked


def cost(backend, strategy, asked):
    """Of one step: calls of a block's first layer, matrix products in backward, bytes kept for it, and the names of
    everything."""
    built = MODELS["mlp"].build()
    names = [name for name, _ in (*built.named_modules(), *built.named_parameters())]
    calls = []
    inner = next(module for name, module in built.named_modules() if name.endswith(".up"))
    inner.register_forward_hook(lambda *_: calls.append(1))
    (micro_batch,) = own_share(1)
    kept = []
    with unishard.prepare(built, config(backend, strategy, activation_checkpointing=word(asked))) as engine:
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.append(tensor.nbytes) or tensor, lambda tensor: tensor
        ):
            loss = engine(**micro_batch).loss
        with Products() as products:
            engine.backward(loss)
        step = engine.step()
        mentioned = [name for name, _ in (*engine.module.named_modules(), *engine.module.named_parameters())]
        assert mentioned == names
        assert set(engine.weights.placement().units) <= set(names)
        return len(calls), products.count, sum(kept), (engine.mean(loss), step.grad_norm)


CASES = ("none", "full", "selective", ("Block",), ("Linear",))
COSTS = tuple((cost, (*pair, asked)) for pair in FEWER for asked in CASES)


def costs(backend, strategy):
    """By what was asked, in the order of `CASES`, on rank 0."""
    return {asked: values(play(COSTS)[cost, (backend, strategy, asked)])[0] for asked in CASES}


@pytest.mark.parametrize(("backend", "strategy"), FEWER)
def test_a_block_runs_twice_and_only_its_products_do_not_when_selective(backend, strategy):
    found = costs(backend, strategy)
    calls = {asked: result[0] for asked, result in found.items()}
    assert calls == {"none": 1, "full": 2, "selective": 2, ("Block",): 2, ("Linear",): 1}
    products = {asked: result[1] for asked, result in found.items()}
    assert products["full"] == products[("Block",)] > products["none"]
    assert products["selective"] == products["none"]


@pytest.mark.parametrize(("backend", "strategy"), FEWER)
def test_less_is_kept_for_backward_and_nothing_else_changes(backend, strategy):
    found = costs(backend, strategy)
    assert found["full"][2] < 0.5 * found["none"][2]
    assert {result[3] for result in found.values()} == {found["none"][3]}  # bit for bit


class Layer(nn.Module):
    """A block that draws random numbers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(13, 13)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return nn.functional.gelu(self.dropout(self.linear(x)))


class Dropping(nn.Module):
    """Blocks that draw random numbers."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(13, 11)

    def forward(self, x, labels):
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), labels)


@in_ranks(cells=EACH, in_turn=True)
def test_random_numbers_are_drawn_again_alike(backend):
    runs = []
    for asked in ("none", "full", "selective"):
        torch.manual_seed(3)
        runs.append([])
        with unishard.prepare(Dropping(), config(backend, activation_checkpointing=asked)) as engine:
            for micro_batch in own_share(3):
                loss = engine(**micro_batch)
                engine.backward(loss)
                runs[-1].append((loss.item(), engine.step().grad_norm))
    assert runs[0] == runs[1] == runs[2]


class Linear(nn.Module):
    """A block whose product is changed in place, by itself or later."""

    def __init__(self, changes):
        super().__init__()
        self.linear, self.changes = nn.Linear(13, 13), changes

    def forward(self, x):
        x = self.linear(x)
        if self.changes:
            x.relu_()
        return x, torch.tanh(2 * x)


class InPlace(Dropping):
    """Changes results of products, in blocks or behind them."""

    def __init__(self, behind):
        super().__init__()
        self.behind = behind
        self.blocks = nn.ModuleList(Linear(not behind) for _ in range(2))

    def forward(self, x, labels):
        for block in self.blocks:
            product, x = block(x)
            x = x + (product.relu_() if self.behind else product)
        return nn.functional.cross_entropy(self.head(x), labels)


def in_place(backend, asked, behind=False):
    torch.manual_seed(3)
    with unishard.prepare(InPlace(behind), config(backend, activation_checkpointing=asked)) as engine:
        for micro_batch in own_share(3):
            loss = engine(**micro_batch)
            engine.backward(loss)
            yield loss.item(), engine.step().grad_norm


@in_ranks(cells=EACH, in_turn=True)
def test_a_block_that_changes_a_product_in_place_trains(backend):
    runs = [[*in_place(backend, asked)] for asked in ("none", "full", "selective")]
    assert runs[0] == runs[1] == runs[2]


@in_ranks(cells=EACH, in_turn=True)
def test_a_compiled_block_keeps_products(backend):
    compiled = {"mode": "per_block", "backend": "aot_eager"}
    curves = []
    for sections in ({}, {"activation_checkpointing": "selective", "compile": compiled}):
        with prepare(config(backend, **sections)) as engine:
            curves.append(curve(train(engine, own_share(2))))
    assert curves[1].losses == pytest.approx(curves[0].losses, rel=1e-6)
    assert curves[1].norms == pytest.approx(curves[0].norms, rel=1e-6)


@in_ranks(cells=EACH, in_turn=True)
def test_a_product_that_is_changed_behind_its_block_is_refused(backend):
    assert "selective keeps a result of a block that is changed in place behind the block" in refused(
        lambda: next(in_place(backend, "selective", behind=True))
    )


@in_ranks(cells=EACH)
def test_a_module_with_units_inside_may_recompute(backend):
    """They are gathered again."""
    units, curves = {"strategy": "full_shard", "units": ["Linear"]}, []
    for asked in ("none", ["Block"]):
        with prepare(config(backend, units, activation_checkpointing=asked)) as engine:
            curves.append(train(engine, own_share(3)))
    assert curves[0] == curves[1]


@in_ranks(cells=EACH, in_turn=True)
def test_a_cache_of_keys_is_left_out_where_it_would_be_filled_twice(backend):
    """A model whose blocks fill a cache of keys and values in each forward."""
    curves = []
    for asked in ("none", "full"):
        torch.manual_seed(5)
        model = MODELS["llama"].build()
        model.config.use_cache = True
        with unishard.prepare(model, config(backend, activation_checkpointing=asked)) as engine:
            curves.append(train(engine, own_share(2, "llama")))
    assert curves[0] == curves[1]


@in_ranks(cells=EACH, in_turn=True)
def test_a_copy_runs_on_its_own_parameters(backend):
    """Of a model that recomputes and is compiled, not on those it was copied from."""
    model = MODELS["mlp"].build()
    sample = own_share(1)[0]
    sections = {"activation_checkpointing": "full", "compile": {"mode": "per_block", "backend": "eager"}}
    with unishard.prepare(model, config(backend, "no_shard", **sections)):
        clone = copy.deepcopy(model)
        before = clone(**sample).loss.item()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        after = clone(**sample).loss.item()
    assert before == after


COMPILED = (
    ("fsdp", "per_block", "inductor" if DEEP else "aot_eager"),  # inductor runs a C++ compiler for half a minute
    ("fsdp", "full", "aot_eager"),
    ("deepspeed", "per_block", "aot_eager"),
)


@in_ranks(cells=COMPILED)
def test_blocks_are_really_compiled_and_keep_their_names(backend, mode, inner):
    """Those that a user sees; and the curve is that without."""
    with prepare(config(backend, "full_shard")) as engine:
        wanted = curve(train(engine, own_share(2)))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with prepare(config(backend, "full_shard", compile={"mode": mode, "backend": inner})) as engine:
        found = curve(train(engine, own_share(2)))
        with engine._guarded.lifted():
            held = engine.module.state_dict()
        seen = [*held, *(name for name, _ in engine.module.named_modules()), *engine.weights.placement().units]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert [name for name in seen if "_orig_mod" in name] == []
    assert found.losses == pytest.approx(wanted.losses, rel=1e-6)
    assert found.norms == pytest.approx(wanted.norms, rel=1e-5)


# -- what is refused -------------------------------------------------------------------------------


REFUSED = {
    "unknown class": "activation_checkpointing: no module of class LlamaDecoder in LlamaForCausalLM; did you mean "
    "LlamaDecoderLayer?",
    "its own": "call model.gradient_checkpointing_disable(), or set activation_checkpointing to none",
    "no blocks": "activation_checkpointing: Sequential has no repeated blocks; its classes with parameters are Linear "
    "(x1, ",
    "compiled inside": "is already compiled; pass the original module, model.layers.1._orig_mod",
    "compiled twice": "compile: model.layers.1 is already compiled (module.compile())",
    "unknown backend": "compile.backend: torch has no backend 'inducter'; choose one of ",
}


@in_ranks(cells=tuple((case,) for case in REFUSED))
def test_what_cannot_be_had_is_refused_on_every_rank(case):
    model, sections = MODELS["llama"].build(), {}
    if case == "unknown class":
        sections = {"activation_checkpointing": ["LlamaDecoder"]}
    elif case == "its own":
        model.gradient_checkpointing_enable()
        sections = {"activation_checkpointing": "full"}
    elif case == "no blocks":
        model, sections = nn.Sequential(nn.Linear(13, 11)), {"activation_checkpointing": "full"}
    elif case == "compiled inside":
        model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
    elif case == "compiled twice":
        model.model.layers[1].compile(backend="eager")
        sections = {"compile": "per_block"}
    elif case == "unknown backend":
        sections = {"compile": {"mode": "full", "backend": "inducter"}}
    assert REFUSED[case] in refused(unishard.prepare, model, config("fsdp", **sections))
