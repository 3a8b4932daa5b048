"""What people write into a model's forward, and around a forward and its backward."""

from __future__ import annotations

import torch
from harness import checked as config
from harness import own_share, prepare, train
from torch import nn

import unishard
from mistakes.habits import in_every_strategy
from mistakes.mistake import elsewhere, mistake
from unishard.testing.models import mlp

WIDTH = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.up(x))


class Appending(Block):
    """Keeps a loss in a list of its caller."""

    def forward(self, x, losses):
        y = super().forward(x)
        losses.append(y.square().mean())
        return y


class Losses(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Appending() for _ in range(3))

    def forward(self, x):
        losses = []
        for block in self.blocks:
            x = block(x, losses)
        return x.mean() + sum(losses)


class Forces(nn.Module):
    """Energy and forces."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, positions):
        hidden = positions = positions.requires_grad_()
        for block in self.blocks:
            hidden = block(hidden)
        energy = hidden.sum()
        (forces,) = torch.autograd.grad(energy, positions, create_graph=True)
        return energy + forces.square().mean()


@mistake("`aux.append(loss)` or `skips.pop()` in a block, on a list that it is passed, under `full_shard` on DeepSpeed")
def list_of_the_caller(backend):
    forward_of("deepspeed", Losses)


@mistake("`torch.autograd.grad(energy, positions)` in the forward, under `full_shard`", Forces)
def forward_of(backend, kind):
    with unishard.prepare(kind(), config(backend, "full_shard")) as engine:
        engine.backward(engine(torch.ones(2, WIDTH)))


@mistake("`parameter.register_hook(...)` after `prepare`", "register_hook")
@mistake("`parameter.register_post_accumulate_grad_hook(...)` after `prepare`", "register_post_accumulate_grad_hook")
@in_every_strategy
def late_hook(backend, strategy, register):
    with prepare(config(backend, strategy)) as engine:
        getattr(engine.module.head.weight, register)(lambda gradient: None)
        train(engine, own_share(1))


@mistake("goes on with the next batch after an error in the forward, such as one of a broken sample", "forward")
@mistake("goes on with the next batch after an error in the backward", "backward")
@in_every_strategy
def going_on(backend, strategy, where):
    with prepare(config(backend, strategy)) as engine:
        good, broken = own_share(2)
        broken = broken | {"labels": broken["labels"] + 1000} if where == "forward" else broken
        try:
            loss = engine(**broken).loss
            loss.register_hook(lambda gradient: fail())
            engine.backward(loss)
        except (IndexError, RuntimeError, unishard.ModelError):
            engine(**good)


def fail():
    raise RuntimeError("no memory")


elsewhere("`engine.discard()` after such an error", "tests/ranks/test_forwards.py::test_a_run_goes_on_after_an_error")


@mistake("`requires_grad_(False)` on all of a discriminator for the generator's loss, and `True` after it")
def toggled_discriminator(backend):
    """It trains as inside `engine.weights.frozen()`."""
    got, right = [], []
    for strategy in ("no_shard", "shard_grad_op", "full_shard"):
        for by_hand in (True, False):
            (got if by_hand else right).extend(adversarial(backend, strategy, by_hand=by_hand))
    return got, right


def adversarial(backend, strategy, *, by_hand):
    """The norms of both after two updates."""
    norms = []
    with (
        prepare(config(backend, strategy)) as generator,
        unishard.prepare(nn.Sequential(Block(), Block()), config(backend, strategy)) as critic,
    ):
        for batch in own_share(2):
            fake = generator(**batch).logits[:, :WIDTH]
            if by_hand:
                critic.module.requires_grad_(False)
                generator.backward(critic(fake).mean())
                critic.module.requires_grad_(True)
            else:
                with critic.weights.frozen():
                    generator.backward(critic(fake).mean())
            norms.append(generator.step().grad_norm)
            critic.backward(critic(fake.detach()).square().mean())
            norms.append(critic.step().grad_norm)
    return norms


elsewhere(
    "`torch.distributed.destroy_process_group()` before the engine is closed",
    "tests/ranks/test_forwards.py::test_an_engine_outlives_its_process_group",
)


@mistake("`torch.jit.script` or `torch.jit.trace` of a part of the model")
def scripted(backend):
    model = mlp()
    model.head = torch.jit.script(model.head)
    unishard.prepare(model, config(backend, "no_shard"))


@mistake("`engine.backward(loss)` under `torch.no_grad()`")
def backward_without_gradients(backend):
    found = []
    for quiet in (True, False):
        with prepare(config(backend, training={"gradient_accumulation_steps": 2})) as engine:
            for batch in own_share(2):
                loss = engine(**batch).loss
                with torch.set_grad_enabled(not quiet):
                    engine.backward(loss)
                step = engine.step()
            found.append(step.grad_norm)
    return found[0], found[1]


elsewhere(
    "an edit of some gradients, such as `parameter.grad.mul_(0.1)`, or `parameter.grad = None` for the last layer",
    "tests/ranks/test_forwards.py::test_an_edited_gradient_of_any_parameter_is_found",
)
elsewhere(
    "a loss with parameters of its own, such as class centers, on several ranks",
    "tests/ranks/test_forwards.py::test_parameters_outside_the_model_are_named_once",
)
elsewhere(
    "`GradScaler.scale(loss)` in `engine.backward`",
    "tests/ranks/test_forwards.py::test_a_loss_scale_by_hand_is_named_once",
)
