"""Several models in one process: trained against each other, taught by a frozen one, only evaluated."""

from __future__ import annotations

import pytest
import torch
from harness import BACKENDS, EVERY, SPANNING, STRATEGIES, config, my_rank, own_share, play, prepare, train, values
from torch import nn
from torch.nn import functional

import unishard
from unishard.testing.models import Mlp, mlp

UPDATES, ACCUMULATION, CLIP = 4, 2, 0.3


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


def seeded(*sizes, seed=3):
    torch.manual_seed(seed)
    return Stack(*sizes)


def drawn(turn, rank):
    generator = torch.Generator().manual_seed(100 + 10 * turn + rank)
    return torch.randn(4, 5, generator=generator), torch.randn(4, 7, generator=generator)


def configured(backend, strategy, precision, lr):
    return config(
        backend,
        strategy,
        precision=precision,
        optimizer={"name": "sgd", "lr": lr, "momentum": 0.9, "weight_decay": 0.0},
        training={"micro_batch_size": 4, "gradient_accumulation_steps": ACCUMULATION, "gradient_clipping": CLIP},
    )


class Plain:
    """The same loop on one process: gradients by hand, over the batches of all ranks."""

    def __init__(self, model, lr):
        self.module, self.parameters = model, list(model.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr, momentum=0.9)
        self.turn = 0

    def learn(self, loss):
        for parameter, gradient in zip(
            self.parameters, torch.autograd.grad(loss / ACCUMULATION, self.parameters), strict=True
        ):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self.turn += 1
        if self.turn % ACCUMULATION:
            return None
        norm = float(nn.utils.clip_grad_norm_(self.parameters, CLIP))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm


# -- a backward that reaches another engine


def mixed_up(backend, strategy):
    """Without `frozen`, and then a window as if nothing had been."""
    cfg = configured(backend, strategy, "fp32", 0.1)
    generator, discriminator = unishard.prepare(seeded(5, 13, 7), cfg), unishard.prepare(seeded(7, 11, 1), cfg)
    try:
        generator.backward(discriminator(generator(drawn(0, 0)[0])).mean())
    except unishard.ContractError as error:
        return str(error)
    return None


# -- gradients of an output ------------------------------------------------------------------------


def sloped(critic, inputs, penalty):
    """A loss with a gradient penalty, or one at inputs that were moved along the gradient."""
    inputs = inputs.clone().requires_grad_()
    output = critic(inputs)
    (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=penalty)
    return (
        output.mean() + (slope.norm(dim=1) - 1).square().mean()
        if penalty
        else critic((inputs + slope).detach()).square().mean()
    )


def slopes(backend, strategy, penalty):
    with unishard.prepare(seeded(5, 13, 1), configured(backend, strategy, "fp32", 0.1)) as critic:
        found = []
        for turn in range(UPDATES * ACCUMULATION):
            try:
                loss = sloped(critic, drawn(turn, my_rank())[0], penalty)
            except unishard.ContractError as error:
                return str(error)
            critic.backward(loss)
            found.append((critic.mean(loss), critic.step().grad_norm))
        return found


def plain_slopes(penalty, world=2):
    critic, found = Plain(seeded(5, 13, 1), 0.1), []
    for turn in range(UPDATES * ACCUMULATION):
        loss = sloped(critic.module, torch.cat([drawn(turn, rank)[0] for rank in range(world)]), penalty)
        found.append((loss.item(), critic.learn(loss)))
    return found


# -- a frozen teacher ------------------------------------------------------------------------------


def distil(backend, strategy, precision, first="student"):
    """The teacher and student in either order, the teacher under full_shard whatever the student's strategy is."""
    cfg = configured(backend, strategy, precision, 0.1)
    teaching = config(backend, "full_shard", precision=precision)
    if first == "student":
        student = unishard.prepare(seeded(5, 13, 7), cfg)
    teacher = unishard.prepare(seeded(5, 17, 7, seed=9), teaching, train=False)
    if first == "teacher":
        student = unishard.prepare(seeded(5, 13, 7), cfg)
    found = []
    with student, teacher:
        for turn in range(UPDATES * ACCUMULATION):
            noise, _ = drawn(turn, my_rank())
            wanted = teacher(noise)
            assert not wanted.requires_grad
            loss = functional.mse_loss(student(noise), wanted)
            student.backward(loss)
            found.append((student.mean(loss), student.step().grad_norm))
        held = teacher.weights.placement()
        return (
            found,
            held.master_numel,
            held.param_bytes,
            any(parameter.requires_grad for parameter in teacher.module.parameters()),
        )


# -- a model that is only evaluated ----------------------------------------------------------------


def evaluated(backend, strategy, precision):
    """Bit for bit what the plain model gives, and the gradient of its inputs where they need one."""
    model, plain = Mlp(), mlp().eval().requires_grad_(False)
    model.load_state_dict(plain.state_dict() if my_rank() == 0 else Mlp().state_dict())
    low = torch.bfloat16 if precision == "bf16" else torch.float32
    for parameter in plain.parameters():
        parameter.data = parameter.data.to(low)
    with unishard.prepare(model, config(backend, strategy, precision=precision), train=False) as engine:
        batch = own_share(1)[0]
        logits = engine(**batch).logits
        same = torch.equal(logits, plain(batch["x"].to(low), batch["labels"]).logits)
        inputs = [batch["x"].clone().requires_grad_() for _ in range(2)]
        engine(inputs[0], batch["labels"]).loss.backward()
        plain(inputs[1].to(low), batch["labels"]).loss.backward()
        placement = engine.weights.placement()
        same &= torch.equal(engine.weights.read("blocks.1.up.weight"), plain.blocks[1].up.weight.float())
        edited = torch.full((37, 23), 0.125)
        engine.weights.write("blocks.1.up.weight", edited)
        plain.blocks[1].up.weight.data.copy_(edited)
        same &= torch.equal(engine(**batch).logits, plain(batch["x"].to(low), batch["labels"]).logits)
        return (
            same and not logits.requires_grad and not engine.module.training,
            torch.equal(inputs[0].grad, inputs[1].grad),
            placement,
        )


def refused(backend, strategy):
    told = {}
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
        for name, call in calls.items():
            try:
                call()
            except unishard.ContractError as error:
                told[name] = str(error)
        seen = [engine(**batch).loss.item() for batch in engine.eval().batches(batches)]
    return told, seen


def random_numbers_stay(backend, strategy):
    torch.manual_seed(5)
    with unishard.prepare(mlp(), config(backend, strategy), train=False):
        here = torch.rand(1).item()
    torch.manual_seed(5)
    return here == torch.rand(1).item()


def many(backend):
    """Five engines at once, closed in another order; the last still trains."""
    engines = [prepare(config(backend, strategy)) for strategy in STRATEGIES]
    engines.append(unishard.prepare(mlp(), config(backend), train=False))
    curves = [train(engine, own_share(2)) for engine in engines[:4]]
    for engine in (engines[3], engines[0], engines[4]):
        engine.close()
    return curves + [train(engine, own_share(2)) for engine in engines[1:3]]


PRECISION_OF = {(backend, strategy): precision for backend, strategy, precision in EVERY}
PLAYED = (
    *((mixed_up, (strategy,)) for strategy in ("no_shard", "full_shard")),
    *(
        (slopes, (strategy, penalty))
        for strategy in ("no_shard", "shard_grad_op", "full_shard")
        for penalty in (False, True)
    ),
    *((refused, (strategy,)) for strategy in ("no_shard", "full_shard")),
    *((random_numbers_stay, (strategy,)) for strategy in ("no_shard", "full_shard")),
    (many, ()),
)


def played(backend, function, *arguments):
    cells = [cell for cell in SPANNING if cell[0] == backend]
    scenarios = (
        *((name, (backend, *given)) for name, given in PLAYED),
        *((name, cell) for name in (distil, evaluated) for cell in cells),
        (distil, (*cells[-1], "teacher")),
    )
    return values(play(scenarios)[function, (backend, *arguments)])


def assert_close(found, wanted, *, rel, floor=0.0):
    for row, expected in zip(found, wanted, strict=True):
        assert [value is None for value in row] == [value is None for value in expected]
        there = [value for value in expected if value is not None]
        assert [value for value in row if value is not None] == pytest.approx(there, rel=rel, abs=floor)


@pytest.mark.parametrize("penalty", [False, True])
@pytest.mark.parametrize("strategy", ["no_shard", "shard_grad_op", "full_shard"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_an_output_are_those_of_plain_torch_or_refused_by_name(backend, strategy, penalty):
    works = backend == "fsdp" and (strategy == "no_shard" or not penalty)
    for found in played(backend, slopes, strategy, penalty):
        if works:
            # The mean of the outputs is subtracted from a penalty of up to 1: a loss of 4e-4 has the rounding of both,
            # over three layers.
            assert_close(found, plain_slopes(penalty), rel=1e-5, floor=1e-6)
        else:
            assert f"does not work with sharding.strategy {strategy} " in found


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_order_of_prepare_calls_makes_no_difference(backend):
    sharded = "full_shard", PRECISION_OF[backend, "full_shard"]
    assert played(backend, distil, *sharded, "teacher") == played(backend, distil, *sharded)


@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backward_of_another_engine_that_would_leave_gradients_is_refused(backend, strategy):
    for told in played(backend, mixed_up, strategy):
        assert "reaches the parameters of its" in told
        assert "with engine.weights.frozen():" in told


@pytest.mark.parametrize(("backend", "strategy", "precision"), SPANNING)
def test_a_frozen_teacher_holds_its_part_alone(backend, strategy, precision):
    elements = sum(parameter.numel() for parameter in seeded(5, 17, 7).parameters())
    size = {"fp32": 4, "bf16": 2}[precision]
    for _, masters, held, needs_gradient in played(backend, distil, strategy, precision):
        assert masters == 0
        assert held <= size * (elements / 2 + 32)
        assert not needs_gradient


@pytest.mark.parametrize(("backend", "strategy", "precision"), SPANNING)
def test_what_is_only_evaluated_gives_what_the_plain_model_gives(backend, strategy, precision):
    whole = 6013 * (2 if precision == "bf16" else 4)
    for same, same_gradient, placement in played(backend, evaluated, strategy, precision):
        assert same
        assert same_gradient
        assert placement.master_numel == 0
        assert placement.param_bytes < 0.55 * whole if strategy == "full_shard" else placement.param_bytes == whole
        assert bool(placement.units) == (strategy == "full_shard")


@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_only_evaluated_cannot_be_trained(backend, strategy):
    for told, seen in played(backend, refused, strategy):
        assert set(told) == {"backward", "step", "train", "lr", "optimizer", "grad"}
        assert all("prepared with train=False" in text for text in told.values())
        assert len(seen) == 2


@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_preparing_what_is_only_evaluated_draws_no_random_numbers(backend, strategy):
    assert all(played(backend, random_numbers_stay, strategy))


@pytest.mark.parametrize("backend", BACKENDS)
def test_engines_live_and_close_in_any_order(backend):
    for curves in played(backend, many):
        losses = [[loss for loss, _ in curve] for curve in curves]
        assert losses[1] == pytest.approx(losses[0], rel=2e-6)
        assert losses[3] == pytest.approx(losses[0], rel=2e-6)
        assert losses[4][0] < losses[0][0]
