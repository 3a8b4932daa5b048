"""What a guard prevents: without it, the same loop trains wrongly, in silence."""

from __future__ import annotations

import contextlib
from itertools import product

import pytest
import torch
from harness import BACKENDS, heard, in_ranks, losses_of, own_share, prepare, train
from harness import checked as config
from mistakes.forwards import WIDTH, Losses
from torch import nn

import unishard
from unishard.engine import engine as engines
from unishard.engine.guards.added_modules import AddedModules
from unishard.engine.guards.copied_containers import CopiedContainers
from unishard.engine.guards.divided_loss import DividedLoss
from unishard.engine.guards.edited_gradients import EditedGradients
from unishard.engine.guards.late_unfreezing import LateUnfreezing
from unishard.engine.guards.parameter_writes import ParameterWrites
from unishard.testing.models import mlp


@contextlib.contextmanager
def left_out(*kinds):
    """A block in which engines have no guards of these kinds."""
    own = engines.training_guards
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            engines,
            "training_guards",
            lambda *arguments: [each for each in own(*arguments) if not isinstance(each, kinds)],
        )
        yield


def initialized_late(backend):
    """Losses of a run that sets a weight to 0 by hand before its first update."""
    with prepare(config(backend, "full_shard")) as engine:
        for parameter in engine.module.head.parameters():
            parameter.data.mul_(0.0)
        return losses_of(engine, own_share(2))


@in_ranks
def test_a_weight_that_is_written_by_hand_is_lost_under_deepspeed_and_not_under_fsdp():
    with left_out(ParameterWrites):
        zeros, kept = initialized_late("fsdp"), initialized_late("deepspeed")
    with prepare(config("fsdp", "full_shard")) as engine:
        right = losses_of(engine, own_share(2))
    assert kept == pytest.approx(right)
    assert zeros[0] != pytest.approx(right[0])
    with pytest.raises(unishard.ContractError, match=r"changed since unishard\.prepare, but not by the engine"):
        initialized_late("fsdp")


def with_a_new_head(backend):
    """Whether an update changes a head that is put into the model after `prepare`."""
    with prepare(config(backend, "shard_grad_op")) as engine:
        head = engine.module.head
        engine.module.head = nn.Linear(head.in_features, head.out_features)
        before = engine.module.head.weight.detach().clone()
        train(engine, own_share(2))
        return not torch.equal(before, engine.module.head.weight.detach())


@in_ranks(cells=tuple((backend,) for backend in BACKENDS), in_turn=True)
def test_a_head_that_is_added_late_does_not_train(backend):
    with left_out(AddedModules):
        assert not with_a_new_head(backend)
    with pytest.raises(unishard.ContractError, match=r"module head was added or replaced after unishard\.prepare"):
        with_a_new_head(backend)


def clipped_by_hand(backend):
    """The norm that the engine sees after a clipping by hand."""
    with prepare(config(backend, "full_shard")) as engine:
        engine.backward(engine(**own_share(1)[0]).loss)
        torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1e-3)
        return engine.step().grad_norm


@in_ranks
def test_a_clipping_by_hand_reaches_one_engine_and_not_the_other():
    with left_out(EditedGradients):
        norms = {backend: clipped_by_hand(backend) for backend in BACKENDS}
    assert norms["fsdp"] == pytest.approx(1e-3, rel=0.01)
    assert norms["deepspeed"] > 0.1
    with pytest.raises(unishard.ContractError, match=r"gradients were changed between engine\.backward"):
        clipped_by_hand("fsdp")


def unfrozen_late(backend, strategy):
    """Whether an update changes a layer that was frozen in `prepare`."""
    model = mlp()
    model.inp.requires_grad_(False)
    with unishard.prepare(model, config(backend, strategy)) as engine:
        before = engine.weights.read("inp.weight").clone()
        engine.module.inp.requires_grad_(True)
        train(engine, own_share(2))
        return not torch.equal(before, engine.weights.read("inp.weight"))


@in_ranks(cells=tuple(product(BACKENDS, ("shard_grad_op", "full_shard"))))
def test_a_layer_that_is_unfrozen_late_does_not_train(backend, strategy):
    with left_out(LateUnfreezing):
        assert not unfrozen_late(backend, strategy)
    with pytest.raises(unishard.ContractError, match="was frozen when the model was prepared"):
        unfrozen_late(backend, strategy)


@in_ranks
def test_a_loss_that_a_block_appends_to_its_callers_list_is_lost_under_stage_3():
    found = {}
    with left_out(CopiedContainers):
        for backend in BACKENDS:
            torch.manual_seed(0)
            with unishard.prepare(Losses(), config(backend, "full_shard")) as engine:
                found[backend] = float(engine(torch.ones(2, WIDTH)).detach())
    assert found["deepspeed"] < found["fsdp"], "squares are added to it"


@in_ranks(cells=tuple((backend,) for backend in BACKENDS), in_turn=True)
def test_a_loss_that_is_divided_by_hand_gives_gradients_that_are_too_small(backend):
    norms = []
    for divisor in (1, 2):
        accumulation = {"gradient_accumulation_steps": 2}
        with left_out(DividedLoss), heard() as lines, prepare(config(backend, training=accumulation)) as engine:
            for batch in engine.batches(own_share(2)):
                engine.backward(engine(**batch).loss / divisor)
                step = engine.step()
            norms.append(step.grad_norm)
        assert not any("division" in line for line in lines)
    assert norms[1] == pytest.approx(norms[0] / 2, rel=1e-5)
