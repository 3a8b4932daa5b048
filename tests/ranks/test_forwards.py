"""Around a forward and its backward: errors that are caught, gradients that are edited, scaled losses, and parameters
that no engine trains."""

from __future__ import annotations

import contextlib
from itertools import product

import pytest
import torch
from harness import (
    BACKENDS,
    assert_conforms,
    config,
    curve,
    error,
    heard,
    in_ranks,
    my_rank,
    own_share,
    play,
    prepare,
    refused,
    tolerance,
    train,
    update,
    values,
    windows,
)
from harness.training import DEEP, FEWER, PAIRS, SPANNING, configured
from mistakes.forwards import Block, Forces, Losses, fail
from torch import nn
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations

import unishard
from unishard.testing import oracle, run_ranks
from unishard.testing.models import mlp

CELLS = (
    *((*pair, "fp32") for pair in PAIRS),
    *((("fsdp", "no_shard", "bf16"), ("deepspeed", "shard_optimizer", "bf16")) if DEEP else ()),
)


# -- errors that are caught ------------------------------------------------------------------------


def going_on(backend, strategy, precision, where):
    """A window whose second micro-batch fails between two good ones."""
    share, done = own_share(6), []
    with prepare(configured(backend, strategy, precision)) as engine:
        done += train(engine, share[:2])
        engine.backward(engine(**share[2]).loss)
        engine.step()
        broken = share[3] | ({"labels": share[3]["labels"] + 1000} if where == "forward" else {})
        # Where it fails, some parameters have their gradients already.
        failing = engine.module.blocks[0].register_full_backward_hook(lambda *given: fail())
        with contextlib.suppress(IndexError, RuntimeError, unishard.ModelError):
            engine.backward(engine(**broken).loss)
        failing.remove()
        engine.discard()
        done += train(engine, share[4:])
    return curve(done)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_a_run_goes_on_after_an_error(cell, where):
    """Once the window is discarded, as if it had not been."""
    played = play(tuple((going_on, (*each, way)) for each in CELLS for way in ("forward", "backward")))
    first, _, third = windows()
    wanted = oracle.train(mlp(), [first, third], configured(*cell), world=2)
    for found in values(played[going_on, (*cell, where)]):
        assert_conforms(found, wanted, tolerance(*cell))


# -- lists of the caller, gradients in the forward -------------------------------------------------


class TransformedForces(Forces):
    """The same by a transform of `torch.func`."""

    def forward(self, positions):
        def energy_of(hidden):
            for block in self.blocks:
                hidden = block(hidden)
            return hidden.sum()

        forces, energy = torch.func.grad_and_value(energy_of)(positions)
        return energy + forces.square().mean()


class Peeking(Forces):
    """Runs a block in inference mode first."""

    def forward(self, x):
        with torch.inference_mode():
            mean = float(self.blocks[0](x).mean())
        for block in self.blocks:
            x = block(x)
        return (x - mean).square().mean()


class Mapped(Forces):
    """Runs under a transform that DeepSpeed's functions do not have."""

    def forward(self, x):
        return torch.func.vmap(nn.Sequential(*self.blocks))(x).square().mean()


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


class Adapting(Block):
    """Computes with another weight in its forward, as peft does for LoRA on experts."""

    def __init__(self):
        super().__init__()
        self.up.weight.requires_grad_(False)

    def forward(self, x):
        register_parametrization(self.up, "weight", Halved())
        y = super().forward(x)
        remove_parametrizations(self.up, "weight", leave_parametrized=False)
        return y


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Adapting() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Sampling(Block):
    """Keeps a distribution around a view of a weight."""

    def forward(self, x):
        self.around = [torch.distributions.Normal(self.up.weight[0], 1.0)]
        return super().forward(x)


class Sampled(nn.Module):
    """Reads it in the loss."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Sampling() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean() - sum(block.around[0].log_prob(torch.ones(8)).mean() for block in self.blocks)


class LateLosses(nn.Module):
    """Appends losses to the list of its caller where it is told to."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(LateAppending() for _ in range(2))

    def forward(self, x, late):
        losses = []
        for block in self.blocks:
            x = block(x, losses, late)
        return x.mean() + sum(losses)


class LateAppending(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x, losses, late):
        y = x + torch.tanh(self.up(x))
        if late:
            losses.append(y.square().mean())
        return y


@in_ranks(cells=(("deepspeed", "full_shard"),))
def test_a_list_that_is_filled_later_is_found_at_once(backend, strategy):
    """In the second micro-batch of the 13th update."""
    sharding = {"strategy": strategy, "units": ["LateAppending"]}
    cfg = config(backend, sharding, training={"gradient_accumulation_steps": 2})
    with unishard.prepare(LateLosses(), cfg) as engine:
        for _ in range(25):
            engine.backward(engine(torch.ones(2, 8), False))
            engine.step()
        said = refused(engine, torch.ones(2, 8), True)
    assert " (LateAppending) changes a list that it is passed, as aux.append(x)" in said


_FREES_NOTHING = {cell for cell in CELLS if "full" not in cell[1]}
WHERE = {
    Losses: {*_FREES_NOTHING, *(cell for cell in CELLS if cell[0] == "fsdp")},
    Forces: _FREES_NOTHING,
    TransformedForces: _FREES_NOTHING,
    Peeking: CELLS,
    Adapted: CELLS,
    Mapped: {cell for cell in CELLS if cell[:2] != ("deepspeed", "full_shard")},
    Sampled: {cell for cell in CELLS if cell[:2] != ("fsdp", "full_shard")},
}
"""Where they train as in plain torch; elsewhere they are refused."""
SAID = {
    Losses: "ModelError: blocks.",
    Mapped: "ModelError: the forward applies a transform of torch.func",
    Sampled: "ModelError: blocks.0 (Sampling) keeps a view of a weight",
}
UNSHARDED = (Forces, TransformedForces)
"""Those that train everywhere with full weights."""


def trained(kind, backend, strategy, precision, unsharded=False):
    torch.manual_seed(3)
    model = kind()
    names = [name for name, _ in model.named_parameters()]
    with unishard.prepare(model, config(backend, strategy, precision=precision)) as engine:
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(my_rank()))
        with engine.weights.unsharded(names) if unsharded else contextlib.nullcontext():
            loss = engine(x)
            engine.backward(loss)
        return engine.mean(loss), engine.step().grad_norm


@pytest.mark.parametrize(
    ("kind", "cell"),
    tuple(product(WHERE, CELLS)),
    ids=lambda value: getattr(value, "__name__", "-".join(map(str, value)) if isinstance(value, tuple) else ""),
)
def test_a_forward_trains_or_is_refused(kind, cell):
    alone = tuple((trained, (each, *where)) for each, where in product(WHERE, CELLS))
    full = tuple((trained, (each, *where, True)) for each in UNSHARDED for where in CELLS if where not in WHERE[each])
    played = play(alone + full)
    outcome = played[trained, (kind, *cell)]
    if cell not in WHERE[kind]:
        assert error(outcome).startswith(SAID.get(kind, "ContractError: the forward computes gradients of its own"))
        if kind not in UNSHARDED:
            return
        outcome = played[trained, (kind, *cell, True)]
    torch.manual_seed(3)
    model, losses = kind(), []
    for rank in range(2):
        losses.append(model(torch.randn(2, 8, generator=torch.Generator().manual_seed(rank))))
        (losses[-1] / 2).backward()
    norm = torch.stack([each.grad.norm() for each in model.parameters() if each.requires_grad]).norm().item()
    rel = 1e-5 if cell[2] == "fp32" else 2e-2
    for loss, found in values(outcome):
        assert loss == pytest.approx(sum(losses).item() / 2, rel=rel)
        assert found == pytest.approx(norm, rel=rel)


@in_ranks(cells=(("deepspeed",),))
def test_an_error_in_an_unsharded_block_is_that_of_the_forward(backend):
    """Not one of the end of the block."""
    model = Mapped()
    names = [name for name, _ in model.named_parameters()]
    with unishard.prepare(model, config(backend, "full_shard")) as engine:
        with pytest.raises(unishard.ModelError, match="applies a transform"), engine.weights.unsharded(names):
            engine(torch.ones(2, 8))
        engine.discard()
        assert engine.weights.read(names[0]).shape == (8, 8)


# -- outputs that the script keeps -----------------------------------------------------------------


def of_another_engine(critic, generator, batch):
    with critic.weights.frozen():
        kept = critic(generator(batch))
        generator.backward(kept.mean())
    generator.step()
    return kept


def of_an_input(critic, generator, batch):
    batch = batch.clone().requires_grad_()
    with critic.weights.frozen():
        kept = critic(batch)
        torch.autograd.grad(kept.sum(), batch)
    return kept


def of_nobody(critic, generator, batch):
    kept = critic(batch)
    critic.backward(critic(2 * batch).mean())
    critic.step()
    return kept


KEEPING = (of_another_engine, of_an_input, of_nobody)


def kept_outputs(strategy, keeps):
    """Norms of the critic; the last output is kept, or not, until its next backward."""
    norms, sharding = [], {"strategy": strategy, "units": ["Linear"]}
    for way in KEEPING:
        training = {"gradient_accumulation_steps": 2 if way is of_nobody else 1}
        torch.manual_seed(0)
        with (
            unishard.prepare(nn.Sequential(*Forces().blocks), config("fsdp", sharding, training=training)) as critic,
            unishard.prepare(nn.Sequential(nn.Linear(8, 8)), config("fsdp", sharding)) as generator,
        ):
            for number in range(2):
                batch = torch.randn(2, 8, generator=torch.Generator().manual_seed(2 * number + my_rank()))
                kept = way(critic, generator, batch)
                if not keeps:
                    del kept
                critic.backward(critic(batch).square().mean())
                norms.append(critic.step().grad_norm)
    return norms


@in_ranks(cells=(("shard_grad_op",), ("full_shard",)))
def test_an_output_that_the_script_keeps_changes_nothing(strategy):
    """Of a forward whose backward another engine, `torch.autograd.grad` or nobody runs, under FSDP2."""
    assert kept_outputs(strategy, keeps=True) == kept_outputs(strategy, keeps=False)


@in_ranks(cells=tuple((backend,) for backend in BACKENDS), in_turn=True)
def test_gradients_in_evaluation_mode_are_explained(backend):
    """Which compute no graph."""
    with pytest.raises(RuntimeError) as raised, prepare(config(backend, "full_shard")) as engine, engine.eval():
        torch.autograd.grad(engine(**own_share(1)[0]).loss, [*engine.module.parameters()])
    assert raised.value.__notes__[0].startswith("engine(...) computes no graph after engine.eval(); for gradients of")


# -- gradients -------------------------------------------------------------------------------------


def drop(parameter):
    parameter.grad = None


EDITS = {
    "dropped": drop,
    "scaled": lambda parameter: parameter.grad.mul_(0.5),
    "clipped, which changes nothing yet": lambda parameter: parameter.grad.clamp_(-1e6, 1e6),
}


EDITED = tuple(
    (*cell, edit)
    for place, cell in enumerate(PAIRS)
    for number, edit in enumerate(EDITS)
    if DEEP or (place + number) % 2 == 0
)


@in_ranks(cells=EDITED)
def test_an_edited_gradient_of_any_parameter_is_found(backend, strategy, edit):
    """Of the last of many."""
    with prepare(config(backend, strategy)) as engine:
        engine.backward(engine(**own_share(1)[0]).loss)
        parameters = [*engine.module.parameters()]
        EDITS[edit](parameters[-1])
        said = refused(engine.step)
        engine.discard()
        update(engine, own_share(1)[0])
    assert len(parameters) > 16
    assert said.startswith("ContractError: gradients were changed between engine.backward and engine.step")


@in_ranks(cells=SPANNING)
def test_gradients_that_a_script_reads_are_those_of_the_update(backend, strategy, precision):
    with prepare(configured(backend, strategy, precision)) as engine:
        for batch in engine.batches(own_share(4)):
            engine.backward(engine(**batch).loss)
            gradients = [each.grad for each in engine.module.parameters() if each.grad is not None]
            norms = [float(gradient.norm()) for gradient in gradients]
            step = engine.step()
            if step.updated:
                assert sum(norm**2 for norm in norms) ** 0.5 == pytest.approx(step.grad_norm, rel=1e-5)
                assert all(each.grad is None for each in engine.module.parameters())


# -- losses ----------------------------------------------------------------------------------------


@in_ranks(cells=FEWER)
def test_clipping_by_hand_that_begins_later_is_found(backend, strategy):
    """From the 13th update on: at once, or on DTensors, whose writes torch does not count there, by a sample."""
    with prepare(config(backend, strategy, training={"gradient_accumulation_steps": 2})) as engine:
        for number, batch in enumerate(own_share(120)):
            engine.backward(engine(**batch).loss)
            if number >= 24:
                torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1e-3)
            said = refused(engine.step)
            if said != "nothing":
                break
    assert 25 <= number < 119 if backend == "fsdp" and strategy != "no_shard" else number == 25
    assert said.startswith("ContractError: gradients were changed between engine.backward and engine.step")


@in_ranks(cells=tuple(product(BACKENDS, (1024.0, 65536.0, 2.0, 1000.0))), in_turn=True)
def test_a_loss_scale_by_hand_is_named_once(backend, factor):
    scaler = torch.amp.GradScaler("cpu", init_scale=factor)
    with heard() as lines, prepare(config(backend, "no_shard")) as engine:
        for batch in own_share(2):
            engine.backward(scaler.scale(engine(**batch).loss))
            engine.step()
    named = [line for line in lines if f"ends in a multiplication by {factor:.0f}, as by GradScaler.scale" in line]
    assert len(named) == (factor in (1024.0, 65536.0) and my_rank() == 0)


@in_ranks(cells=tuple((*pair, outside) for pair in FEWER for outside in (True, False)), in_turn=True)
def test_parameters_outside_the_model_are_named_once(backend, strategy, outside):
    centers = nn.Parameter(torch.zeros(11)) if outside else torch.zeros(11)
    with heard() as lines, prepare(config(backend, strategy)) as engine:
        for batch in own_share(2):
            engine.backward((engine(**batch).logits.float() - centers).square().mean())
            engine.step()
    named = [line for line in lines if "the loss reaches a parameter of shape (11,) that is in no prepared" in line]
    assert len(named) == (outside and my_rank() == 0)


@in_ranks(cells=FEWER, in_turn=True)
def test_a_parameter_of_another_engine_is_in_a_prepared_model(backend, strategy):
    """A loss that reaches both is refused, and nothing else is said of it."""
    with (
        heard() as lines,
        prepare(config(backend, strategy)) as engine,
        prepare(config(backend, strategy)) as other,
    ):
        for batch in own_share(2):
            loss = engine(**batch).loss
            refused(engine.backward, loss + other(**batch).loss)
            engine.discard()
            other.discard()
    assert [line for line in lines if "in no prepared model" in line] == []


# -- the end ---------------------------------------------------------------------------------------


def closed_late(backend, strategy):
    with prepare(config(backend, strategy)) as engine:
        update(engine, own_share(1)[0])
        torch.distributed.destroy_process_group()
    return True


@pytest.mark.parametrize("cell", [pair for pair in PAIRS if pair[1] != "no_shard"])
def test_an_engine_outlives_its_process_group(cell):
    assert run_ranks(2, closed_late, *cell) == [True, True]
