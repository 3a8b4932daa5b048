"""Optimizers step shards as plain tensors: what the user sees of that, and what it takes for many parameters."""

from __future__ import annotations

import sys
from itertools import product
from typing import Any

import pytest
import torch
from harness import assert_conforms, in_ranks, play, values
from harness.training import BACKENDS, config, curve, everyones, own_share, train
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import unishard
from unishard.testing import oracle
from unishard.testing.conformance import TOLERANCES
from unishard.testing.models import MlpOutput, mlp

UPDATES = 4
OFFLOAD = {"device": "none", "host": {"params": "none", "optimizer": "cpu"}}
"""By where the optimizer steps."""

# -- groups, state and hooks have the model's parameters -------------------------------------------

PLACES = (("full_shard", "device"), ("shard_grad_op", "device"), ("full_shard", "host"))


@in_ranks(cells=tuple((*place, kind) for place in PLACES for kind in ("AdamW", "SGD")))
def test_groups_state_and_hooks_have_the_parameters_of_the_model(strategy, where, kind):
    model, seen = mlp(), []
    own = getattr(torch.optim, kind)(model.parameters(), lr=0.01)

    def look(optimizer: Any, args: Any, kwargs: Any) -> None:
        every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        seen.append((every, {*map(id, optimizer.state)}, [parameter.grad is None for parameter in every]))

    own.register_step_pre_hook(look)
    own.register_step_post_hook(look)
    with unishard.prepare(model, config("fsdp", strategy, optimizer=None, offload=OFFLOAD[where]), own) as engine:
        engine.optimizer.register_step_pre_hook(look)
        own.register_step_post_hook(look)
        train(engine, own_share(2))
        every = [*engine.module.parameters()]
        groups = [parameter for group in engine.optimizer.param_groups for parameter in group["params"]]
        state = {*map(id, own.state)}
    assert [*map(id, groups)] == [*map(id, every)]
    assert state == ({*map(id, every)} if kind == "AdamW" else state)
    assert len(seen) == 8
    for held, keys, missing in seen:
        assert [*map(id, held)] == [*map(id, every)]
        assert keys <= {*map(id, every)}
        assert not any(missing)


@in_ranks(cells=PLACES)
def test_what_hooks_write_counts(strategy, where):
    """Gradients before an update, and weights after it."""
    model = mlp()
    name, mask = next(iter(dict(model.named_parameters()))), []
    cfg = config("fsdp", strategy, offload=OFFLOAD[where], optimizer={"name": "sgd", "lr": 0.1})
    with unishard.prepare(model, cfg) as engine:
        first = dict(engine.module.named_parameters())[name]

        def drop(optimizer: Any, args: Any, kwargs: Any) -> None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter is not first:
                        parameter.grad.zero_()

        def halve(optimizer: Any, args: Any, kwargs: Any) -> None:
            with torch.no_grad():
                mask.append(first.to_local().numel())
                first.mul_(0.5)

        engine.optimizer.register_step_pre_hook(drop)
        engine.optimizer.register_step_post_hook(halve)
        before = engine.weights.state_dict(all_ranks=True)
        batch = own_share(1)[0]
        engine.backward(engine(**batch).loss)
        gradient = engine.gradients.read(name)
        engine.step()
        after = engine.weights.state_dict(all_ranks=True)
    assert len(mask) == 1
    for each in before:
        wanted = (before[each] - 0.1 * gradient) * 0.5 if each == name else before[each]
        torch.testing.assert_close(after[each], wanted, rtol=1e-6, atol=1e-7)


@in_ranks(cells=PLACES)
def test_a_hook_on_every_optimizer_sees_one_step_of_all_and_its_edits_count(strategy, where):
    calls = []

    def zero(optimizer: Any, args: Any, kwargs: Any) -> None:
        every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        calls.append(len(every))
        for parameter in every:
            parameter.grad.zero_()

    with unishard.prepare(mlp(), config("fsdp", strategy, offload=OFFLOAD[where])) as engine:
        before = engine.weights.norms()
        handle = register_optimizer_step_pre_hook(zero)
        try:
            train(engine, own_share(1))
        finally:
            handle.remove()
        assert engine.weights.norms() == before
        assert calls == [len([*engine.module.parameters()])]


def cleared(backend, strategy, where):
    cfg = config(backend, strategy, offload=OFFLOAD[where], optimizer={"name": "sgd", "lr": 0.05, "momentum": 0.9})
    with unishard.prepare(mlp(), cfg) as engine:
        steps = train(engine, own_share(2))
        engine.optimizer.state.clear()
        return curve([*steps, *train(engine, own_share(4)[2:])])


def cleared_in_plain_torch():
    windows = [everyones(index, index + 1, world=2) for index in range(4)]
    return oracle.train(mlp(), windows, config("fsdp", optimizer=None), world=2, optimizer=Forgetful)


class Forgetful(torch.optim.SGD):
    """Loses its state after two updates."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05, momentum=0.9)
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        if self.steps == 2:
            self.state.clear()
        self.steps += 1
        return super().step(closure)


CLEARED = tuple((cleared, ("fsdp", *place)) for place in PLACES)


@pytest.mark.parametrize("place", PLACES, ids="-".join)
def test_state_that_a_script_clears_is_gone(place):
    wanted = values(play(((cleared_in_plain_torch, ()),), 1)[cleared_in_plain_torch, ()])[0]
    for found in values(play(CLEARED)[cleared, ("fsdp", *place)]):
        assert_conforms(found, wanted, TOLERANCES["fp32"])


# -- classes whose updates may need whole tensors --------------------------------------------------


class TrustRatio(torch.optim.Optimizer):
    """Scales each update by the norms of the whole parameter and of its whole gradient."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                ratio = parameter.norm() / (parameter.grad.norm() + 1e-6)
                parameter.sub_(parameter.grad * ratio * group["lr"])


class Scaled(torch.optim.SGD):
    """One of torch's, with another step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05)

    step = TrustRatio.step


def with_whole_tensors(kind):
    with unishard.prepare(mlp(), config("fsdp", optimizer=None), kind) as engine:
        return curve(train(engine, own_share(UPDATES)))


def whole_in_plain_torch():
    windows = [everyones(index, index + 1, world=2) for index in range(UPDATES)]
    return oracle.train(mlp(), windows, config("fsdp", optimizer=None), world=2, optimizer=TrustRatio)


WHOLE = tuple((with_whole_tensors, (kind,)) for kind in (TrustRatio, Scaled))


@pytest.mark.parametrize("kind", [TrustRatio, Scaled])
def test_a_class_of_the_user_s_gets_whole_norms(kind):
    wanted = values(play(((whole_in_plain_torch, ()),), 1)[whole_in_plain_torch, ()])[0]
    for found in values(play(WHOLE)[with_whole_tensors, (kind,)]):
        assert_conforms(found, wanted, TOLERANCES["fp32"])


# -- many parameters -------------------------------------------------------------------------------


class Many(nn.Module):
    """Blocks of small parameters."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])

    def forward(self, x: Any) -> MlpOutput:
        for block in self.blocks:
            x = block(x)
        return MlpOutput(x.square().mean(), x)


class Block(nn.Module):
    """20 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(20)])

    def forward(self, x: Any) -> Any:
        for scale in self.scales:
            x = x + 0.01 * scale * x
        return x


def calls_of_updates(backend: str, strategy: str, blocks: int) -> list[int]:
    """Calls of Python, also of builtins, in each of two updates."""
    counted: list[int] = []

    def count(frame: Any, event: str, arg: Any) -> None:
        counted[-1] += event in ("call", "c_call")

    cfg = config(backend, {"strategy": strategy, "units": ["Block"]}, optimizer={"name": "adamw", "lr": 0.01})
    with unishard.prepare(Many(blocks), cfg) as engine:
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 4)).loss)
            counted.append(0)
            sys.setprofile(count)
            try:
                engine.step()
            finally:
                sys.setprofile(None)
    return counted


@in_ranks(cells=tuple((*pair,) for pair in product(BACKENDS, ("full_shard", "shard_grad_op"))))
def test_an_update_takes_no_longer_per_parameter_for_more_of_them(backend, strategy):
    few, many = (calls_of_updates(backend, strategy, blocks) for blocks in (3, 12))
    assert all(most < 4.5 * least for least, most in zip(few, many, strict=True)), (few, many)
