"""Around a forward and its backward: errors that are caught, gradients that are edited, scaled losses, and parameters
that no engine trains."""

from __future__ import annotations

import contextlib
from itertools import product

import pytest
import torch
from harness import (
    BACKENDS,
    STRATEGIES,
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
from harness.training import PAIRS, SPANNING, configured
from mistakes.forwards import Forces, Losses, fail
from torch import nn

import unishard
from unishard.testing import oracle, run_ranks
from unishard.testing.models import mlp

CELLS = (
    *((backend, strategy, "fp32") for backend in BACKENDS for strategy in STRATEGIES),
    ("fsdp", "no_shard", "bf16"),
    ("deepspeed", "shard_optimizer", "bf16"),
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

WHERE = {
    Losses: {
        ("fsdp", "no_shard", "fp32"),
        *(cell for cell in CELLS if cell[0] == "deepspeed" and "full" not in cell[1]),
    },
}
WHERE[Forces] = WHERE[Losses]
"""Where they train as in plain torch; elsewhere they are refused."""


def trained(kind, backend, strategy, precision):
    torch.manual_seed(3)
    with unishard.prepare(kind(), config(backend, strategy, precision=precision)) as engine:
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(my_rank()))
        loss = engine(x)
        engine.backward(loss)
        return engine.mean(loss), engine.step().grad_norm


@pytest.mark.parametrize(
    ("kind", "cell"),
    tuple(product(WHERE, CELLS)),
    ids=lambda value: getattr(value, "__name__", "-".join(map(str, value)) if isinstance(value, tuple) else ""),
)
def test_a_forward_trains_or_is_refused(kind, cell):
    outcome = play(tuple((trained, (each, *where)) for each, where in product(WHERE, CELLS)))[trained, (kind, *cell)]
    if cell not in WHERE[kind]:
        said = {Losses: "ModelError: blocks.", Forces: "ContractError: the forward computes gradients of its own"}
        assert error(outcome).startswith(said[kind])
        return
    torch.manual_seed(3)
    model, losses = kind(), []
    for rank in range(2):
        losses.append(model(torch.randn(2, 8, generator=torch.Generator().manual_seed(rank))))
        (losses[-1] / 2).backward()
    norm = torch.stack([each.grad.norm() for each in model.parameters()]).norm().item()
    rel = 1e-5 if cell[2] == "fp32" else 2e-2
    for loss, found in values(outcome):
        assert loss == pytest.approx(sum(losses).item() / 2, rel=rel)
        assert found == pytest.approx(norm, rel=rel)


# -- gradients -------------------------------------------------------------------------------------


def drop(parameter):
    parameter.grad = None


EDITS = {
    "dropped": drop,
    "scaled": lambda parameter: parameter.grad.mul_(0.5),
    "clipped, which changes nothing yet": lambda parameter: parameter.grad.clamp_(-1e6, 1e6),
}


@in_ranks(cells=tuple((*cell, edit) for cell in PAIRS for edit in EDITS))
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


@in_ranks(cells=tuple(product(BACKENDS, (1024.0, 65536.0, 2.0, 1000.0))))
def test_a_loss_scale_by_hand_is_named_once(backend, factor):
    scaler = torch.amp.GradScaler("cpu", init_scale=factor)
    with heard() as lines, prepare(config(backend)) as engine:
        for batch in own_share(2):
            engine.backward(scaler.scale(engine(**batch).loss))
            engine.step()
    named = [line for line in lines if f"ends in a multiplication by {factor:.0f}, as by GradScaler.scale" in line]
    assert len(named) == (factor in (1024.0, 65536.0) and my_rank() == 0)


@in_ranks(cells=tuple(product(BACKENDS, STRATEGIES, (True, False))))
def test_parameters_outside_the_model_are_named_once(backend, strategy, outside):
    centers = nn.Parameter(torch.zeros(11)) if outside else torch.zeros(11)
    with heard() as lines, prepare(config(backend, strategy)) as engine:
        for batch in own_share(2):
            engine.backward((engine(**batch).logits.float() - centers).square().mean())
            engine.step()
    named = [line for line in lines if "the loss reaches a parameter of shape (11,) that is in no prepared" in line]
    assert len(named) == (outside and my_rank() == 0)


# -- the end ---------------------------------------------------------------------------------------


def closed_late(backend, strategy):
    with prepare(config(backend, strategy)) as engine:
        update(engine, own_share(1)[0])
        torch.distributed.destroy_process_group()
    return True


@pytest.mark.parametrize("cell", [(backend, strategy) for backend in BACKENDS for strategy in STRATEGIES[1:]])
def test_an_engine_outlives_its_process_group(cell):
    assert run_ranks(2, closed_late, *cell) == [True, True]
