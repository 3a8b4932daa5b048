"""The training state that DeepSpeed keeps in ways of its own: saved after some updates and loaded into a fresh engine,
it trains on bit by bit."""

from __future__ import annotations

import torch
from deepspeed.utils import safe_get_full_optimizer_state
from harness import config, in_ranks, losses_of, my_rank, own_share, prepare
from harness.training import ADAMW
from torch import nn
from torch.nn import functional

import unishard
from unishard.testing.models import MlpOutput

BEFORE, AFTER = 3, 3
"""Updates, and those that follow."""


class Tower(nn.Module):
    """Never used."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(13, 5)


class Model(nn.Module):
    """A weight that stays frozen, a bias that is frozen midway, a tower that nobody uses, and a parameter of one
    element."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.inp = nn.Linear(13, 13)
        self.inp.weight.requires_grad_(False)
        self.late = nn.Linear(13, 7)
        self.tower = Tower()
        self.gain = nn.Parameter(torch.full((1,), 1.0 + seed / 10))
        self.out = nn.Linear(7, 11)

    def forward(self, x, labels):
        logits = self.out(functional.gelu(self.late(self.inp(x)))) * self.gain
        return MlpOutput(functional.cross_entropy(logits.float(), labels), logits)


def in_groups(params):
    """Two groups; SGD with momentum, which keeps no number."""
    params = list(params)
    return torch.optim.SGD(
        [{"params": params[::2], "lr": 0.1}, {"params": params[1::2], "weight_decay": 0.1}], lr=0.05, momentum=0.9
    )


def counting(params):
    return Counting(list(params), {"lr": 0.05})


def adagrad(params):
    return torch.optim.Adagrad(params, lr=0.05, initial_accumulator_value=0.1)


class Counting(torch.optim.Optimizer):
    """A user's own, which counts in an int."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["updates"] = state.get("updates", 0) + 1
                    parameter.sub_(parameter.grad, alpha=group["lr"] / state["updates"])


SECTIONS = {
    "fp16": {"precision": {"compute": "fp16", "loss_scale": 64.0}},
    "bf16": {"precision": {"compute": "bf16", "accumulate": "fp32"}},
    "bf16 masters": {"precision": {"compute": "bf16", "master": "bf16"}},
    "all offloaded": {"precision": "bf16", "offload": {"optimizer": "cpu", "params": "cpu"}},
    "persistent": {"native": {"deepspeed": {"zero_optimization": {"stage3_param_persistence_threshold": 50}}}},
    "sub-groups": {"native": {"deepspeed": {"zero_optimization": {"sub_group_size": 100}}}},
}
OPTIMIZERS = {"groups": in_groups, "counting": counting, "adagrad": adagrad}
CELLS = (
    ("no_shard", "fp16"),
    ("no_shard", "counting"),
    ("shard_optimizer", "bf16"),
    ("shard_grad_op", "bf16 masters"),
    ("shard_grad_op", "groups"),
    ("full_shard", "counting"),
    ("full_shard", "adagrad"),
    ("full_shard", "all offloaded"),
    ("full_shard", "persistent"),
    ("full_shard", "sub-groups"),
)


def prepared(seed, strategy, variety):
    """With a tower that DeepSpeed keeps whole."""
    own = OPTIMIZERS.get(variety)
    sections = {"optimizer": None if own else ADAMW, **SECTIONS.get(variety, {})}
    cfg = config("deepspeed", {"strategy": strategy, "conditional_modules": ["Tower"]}, **sections)
    return unishard.prepare(Model(seed), cfg, optimizer=own) if own else unishard.prepare(Model(seed), cfg)


@in_ranks(cells=CELLS)
def test_a_fresh_engine_with_the_state_of_another_trains_on_as_that_one(strategy, variety, root):
    batches = own_share(BEFORE + AFTER)
    with prepared(3, strategy, variety) as engine:
        losses_of(engine, batches[: BEFORE - 1])
        engine.weights.set_trainable("late.bias", False)
        losses_of(engine, batches[BEFORE - 1 : BEFORE])
        folder = engine.save(root)
        rest = losses_of(engine, batches[BEFORE:])
        wanted = {name: engine.weights.read(name) for name, _ in engine.module.named_parameters()}
    with prepared(4, strategy, variety) as engine:
        engine.load(folder)
        again = losses_of(engine, batches[BEFORE:])
        found = {name: engine.weights.read(name) for name, _ in engine.module.named_parameters()}
    assert len(set(rest)) == AFTER
    assert again == rest
    assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []


@in_ranks(cells=(("shard_grad_op", "fp32"), ("full_shard", "bf16")))
def test_masters_whose_parameters_agree_move_as_a_whole_again(strategy, precision, root):
    """After a load into an engine whose masters were in pieces; what DeepSpeed then finds of them."""
    cfg = config("deepspeed", strategy, precision=precision, optimizer=ADAMW)
    batches = own_share(8)
    with prepare(cfg) as engine:
        losses_of(engine, batches[:BEFORE])
        folder = engine.save(root)
        moment = safe_get_full_optimizer_state(engine.module.head.weight, "exp_avg").clone()
    with prepare(cfg) as engine:
        engine.weights.set_trainable("head", False)
        losses_of(engine, batches[7:])
        engine.weights.set_trainable("head", True)
        engine.load(folder)
        zero = engine._adapter.zero
        states = zero.inner.optimizer.state.values()
        entries = sum(bool(state) for state in states)
        steps = [state["step"] for state in states]
        masters = zero.masters
        loaded = safe_get_full_optimizer_state(engine.module.head.weight, "exp_avg")
        same = torch.equal(moment, loaded)
    assert entries == len(masters), my_rank()
    assert len({step.data_ptr() for step in steps}) == len(steps), "none is shared"
    assert same
