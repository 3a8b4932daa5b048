"""Several models in one process: trained against each other, taught by a frozen one, only evaluated."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from harness import (
    BACKENDS,
    EACH,
    EVERY,
    SPANNING,
    STRATEGIES,
    Scenario,
    config,
    in_ranks,
    losses_of,
    my_rank,
    own_share,
    prepare,
    refused,
)
from torch import nn
from torch.nn import functional

import unishard
from unishard.testing.models import Mlp, mlp

MICRO_BATCHES = 8
EITHER = tuple(product(BACKENDS, ("no_shard", "full_shard")))


class Stack(nn.Module):
    """Units of odd sizes, and its output in fp32 for a loss."""

    def __init__(self, features, hidden, out):
        super().__init__()
        self.inp = nn.Linear(features, hidden)
        self.blocks = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(2))
        self.out = nn.Linear(hidden, out)

    def forward(self, x):
        hidden = self.inp(x)
        for block in self.blocks:
            hidden = hidden + functional.gelu(block(hidden))
        return self.out(hidden).float()


def drawn(number, rank):
    return {"x": torch.randn(4, 5, generator=torch.Generator().manual_seed(100 + 10 * number + rank))}


def configured(backend, strategy, precision="fp32"):
    training = {"micro_batch_size": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.3}
    return config(backend, strategy, precision=precision, training=training)


# -- a backward that reaches another engine


@in_ranks(cells=EITHER)
def test_a_backward_of_another_engine_that_would_leave_gradients_is_refused(backend, strategy):
    cfg = configured(backend, strategy)
    generator, discriminator = unishard.prepare(Stack(5, 13, 7), cfg), unishard.prepare(Stack(7, 11, 1), cfg)
    told = refused(generator.backward, discriminator(generator(**drawn(0, 0))).mean())
    assert "reaches the parameters of its" in told
    assert "with engine.weights.frozen():" in told


# -- gradients of an output ------------------------------------------------------------------------


def sloped(critic, batch, penalty):
    """A loss with a gradient penalty, or one at inputs that were moved along the gradient."""
    inputs = batch["x"].clone().requires_grad_()
    output = critic(inputs)
    (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=penalty)
    if not penalty:
        return critic((inputs + slope).detach()).square().mean()
    # Beside 1, since the mean of the outputs is subtracted from a penalty of up to 1: what is left has their rounding.
    return 1 + output.mean() + (slope.norm(dim=1) - 1).square().mean()


SLOPED = {
    penalty: Scenario(Stack, (5, 13, 1), drawn, partial(sloped, penalty=penalty), MICRO_BATCHES)
    for penalty in (False, True)
}
SLOPES = tuple(product(BACKENDS, ("no_shard", "shard_grad_op", "full_shard"), SLOPED))
WORKING = tuple(cell for cell in SLOPES if cell[0] == "fsdp" and (cell[1] == "no_shard" or not cell[2]))


@in_ranks(cells=WORKING)
def test_gradients_of_an_output_are_those_of_plain_torch(backend, strategy, penalty):
    SLOPED[penalty].judge(configured(backend, strategy))


@in_ranks(cells=tuple(cell for cell in SLOPES if cell not in WORKING))
def test_other_gradients_of_an_output_are_refused_by_name(backend, strategy, penalty):
    with unishard.prepare(SLOPED[penalty].built(), configured(backend, strategy)) as critic:
        told = refused(sloped, critic, drawn(0, my_rank()), penalty)
    assert f"does not work with sharding.strategy {strategy} " in told


# -- a frozen teacher ------------------------------------------------------------------------------


def distilled(backend, strategy, precision, order=("student", "teacher")):
    """Losses and norms of a student; and what its teacher holds, under full_shard whatever the student's strategy is,
    and its parameters."""
    torch.manual_seed(3)
    taught, teaching = configured(backend, strategy, precision), config(backend, "full_shard", precision=precision)
    prepared = {
        "student": partial(unishard.prepare, Stack(5, 13, 7), taught),
        "teacher": partial(unishard.prepare, Stack(5, 17, 7), teaching, train=False),
    }
    engines = {name: prepared[name]() for name in order}
    found = []
    with engines["student"] as student, engines["teacher"] as teacher:
        for number in range(MICRO_BATCHES):
            micro_batch = drawn(number, my_rank())
            wanted = teacher(**micro_batch)
            assert not wanted.requires_grad
            loss = functional.mse_loss(student(**micro_batch), wanted)
            student.backward(loss)
            found.append((student.mean(loss), student.step().grad_norm))
        return found, teacher.weights.placement(), [*teacher.module.parameters()]


PRECISION_OF = {(backend, strategy): precision for backend, strategy, precision in EVERY}


@in_ranks(cells=EACH)
def test_the_order_of_prepare_calls_makes_no_difference(backend):
    sharded = backend, "full_shard", PRECISION_OF[backend, "full_shard"]
    assert distilled(*sharded)[0] == distilled(*sharded, ("teacher", "student"))[0]


@in_ranks(cells=SPANNING)
def test_a_frozen_teacher_holds_its_part_alone(backend, strategy, precision):
    _, held, parameters = distilled(backend, strategy, precision)
    elements, size = sum(each.numel() for each in Stack(5, 17, 7).parameters()), {"fp32": 4, "bf16": 2}[precision]
    assert held.master_numel == 0
    assert held.param_bytes <= size * (elements / 2 + 32)
    assert not any(each.requires_grad for each in parameters)


# -- a model that is only evaluated ----------------------------------------------------------------


@in_ranks(cells=SPANNING)
def test_what_is_only_evaluated_gives_what_the_plain_model_gives(backend, strategy, precision):
    """Bit for bit, and the gradient of its inputs where they need one."""
    model, plain = Mlp(), mlp().eval().requires_grad_(False)
    model.load_state_dict(plain.state_dict() if my_rank() == 0 else Mlp().state_dict())
    low = torch.bfloat16 if precision == "bf16" else torch.float32
    for parameter in plain.parameters():
        parameter.data = parameter.data.to(low)
    with unishard.prepare(model, config(backend, strategy, precision=precision), train=False) as engine:
        batch = own_share(1)[0]
        logits, wanted = engine(**batch).logits, plain(batch["x"].to(low), batch["labels"]).logits
        inputs = [batch["x"].clone().requires_grad_() for _ in range(2)]
        engine(inputs[0], batch["labels"]).loss.backward()
        plain(inputs[1].to(low), batch["labels"]).loss.backward()
        placement, training = engine.weights.placement(), engine.module.training
        read, own = engine.weights.read("blocks.1.up.weight"), plain.blocks[1].up.weight.float().clone()
        edited = torch.full((37, 23), 0.125)
        engine.weights.write("blocks.1.up.weight", edited)
        plain.blocks[1].up.weight.data.copy_(edited)
        after, wanted_after = engine(**batch).logits, plain(batch["x"].to(low), batch["labels"]).logits
    assert torch.equal(logits, wanted)
    assert torch.equal(read, own)
    assert torch.equal(after, wanted_after)
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    assert not logits.requires_grad
    assert not training
    whole = 6013 * (2 if precision == "bf16" else 4)
    assert placement.master_numel == 0
    assert placement.param_bytes < 0.55 * whole if strategy == "full_shard" else placement.param_bytes == whole
    assert bool(placement.units) == (strategy == "full_shard")


@in_ranks(cells=EITHER)
def test_what_is_only_evaluated_cannot_be_trained(backend, strategy):
    batches = own_share(2)
    with unishard.prepare(mlp(), config(backend, strategy), train=False) as engine:
        loss = engine(batches[0]["x"].requires_grad_(), batches[0]["labels"]).loss
        calls = {
            "backward": lambda: engine.backward(loss),
            "step": lambda: engine.step(),
            "train": lambda: engine.train(),
            "lr": lambda: engine.lr,
            "optimizer": lambda: engine.optimizer,
            "grad": lambda: engine.gradients.read("head.bias"),
        }
        told = {name: refused(call) for name, call in calls.items()}
        seen = [engine(**batch).loss.item() for batch in engine.eval().batches(batches)]
    assert len(seen) == 2
    for name, text in told.items():
        assert text.startswith("ContractError"), name
        assert "prepared with train=False" in text, name


@in_ranks(cells=EITHER)
def test_preparing_what_is_only_evaluated_draws_no_random_numbers(backend, strategy):
    torch.manual_seed(5)
    with unishard.prepare(mlp(), config(backend, strategy), train=False):
        here = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(here, torch.rand(1))


@in_ranks(cells=EACH)
def test_engines_live_and_close_in_any_order(backend):
    """Five at once; the last ones still train."""
    engines = [prepare(config(backend, strategy)) for strategy in STRATEGIES]
    engines.append(unishard.prepare(mlp(), config(backend), train=False))
    losses = [losses_of(engine, own_share(2)) for engine in engines[:4]]
    for engine in (engines[3], engines[0], engines[4]):
        engine.close()
    later = [losses_of(engine, own_share(2)) for engine in engines[1:3]]
    assert losses[1] == pytest.approx(losses[0], rel=2e-6)
    assert losses[3] == pytest.approx(losses[0], rel=2e-6)
    assert later[0][0] < losses[0][0]
