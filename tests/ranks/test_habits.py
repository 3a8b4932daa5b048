"""Habits from torch and Accelerate that end in a warning, or that only one engine can see."""

from __future__ import annotations

import math

import pytest
import torch
from harness import BACKENDS, error, heard, own_share, play, prepare, train, values
from harness import checked as config
from mistakes.habits import ACCUMULATION, clip_each_micro_batch
from torch import nn
from torch.nn import functional

import unishard
from unishard.testing.models import mlp

SEEN = (("fsdp", "shard_grad_op"), ("fsdp", "full_shard"))
UNSEEN = (("deepspeed", "shard_grad_op"), ("deepspeed", "full_shard"))


def clipped(backend, strategy):
    with prepare(config(backend, strategy, training=ACCUMULATION)) as engine:
        return clip_each_micro_batch(engine)


def edited_by_the_engine(backend, strategy):
    """What the engine itself does to gradients is no habit."""
    with prepare(config(backend, strategy, training=ACCUMULATION)) as engine:
        for index, batch in enumerate(engine.batches(own_share(6))):
            engine.backward(engine(**batch).loss)
            if index % 2:
                engine.set_grad("head.weight", torch.zeros_like(engine.grad("head.weight")))
            step = engine.step(clip_grad_norm=1e-3)
        engine.backward(engine(**own_share(1)[0]).loss)
        engine.discard()
        train(engine, own_share(2))
        return step.updated


CLIPPED = tuple((clipped, cell) for cell in SEEN + UNSEEN)
EDITED = tuple(
    (edited_by_the_engine, (backend, strategy)) for backend in BACKENDS for strategy in ("no_shard", "full_shard")
)


@pytest.mark.parametrize("cell", SEEN, ids="-".join)
def test_clipping_by_hand_is_refused_where_parameters_hold_gradients(cell):
    said = error(play(CLIPPED + EDITED)[clipped, cell])
    assert said.startswith(
        "ContractError: gradients were changed between engine.backward and engine.step, as by torch.nn.utils.clip_grad"
    )


@pytest.mark.parametrize("cell", UNSEEN, ids="-".join)
def test_clipping_by_hand_finds_no_gradients_at_the_later_stages_of_deepspeed(cell):
    for said in values(play(CLIPPED + EDITED)[clipped, cell]):
        assert [norm for norm, _ in said] == [0.0, 0.0]
        assert said[1][1] > 1.0


@pytest.mark.parametrize("cell", EDITED, ids=lambda cell: "-".join(cell[1]))
def test_what_the_engine_does_to_gradients_is_not_refused(cell):
    assert values(play(CLIPPED + EDITED)[cell]) == [True, True]


# -- a division by hand ----------------------------------------------------------------------------

DIVIDED = {
    "divided": lambda loss: loss / 4,
    "in place": lambda loss: loss.clone().div_(4),
    "by a tensor": lambda loss: loss / torch.tensor(4.0),
    "multiplied": lambda loss: loss * 0.25,
    "not": lambda loss: loss,
    "by another number": lambda loss: loss / 3,
    "inside": lambda loss: (loss / 4) * 2,
    "by a loss": lambda loss: loss / loss.detach(),
    "by zero": lambda loss: loss * 0.0,
}


def divided(backend, how):
    """What is logged in two windows."""
    with heard() as lines, prepare(config(backend, training={"gradient_accumulation_steps": 4})) as engine:
        for batch in engine.batches(own_share(8)):
            engine.backward(DIVIDED[how](engine(**batch).loss))
            engine.step()
    return [line for line in lines if "division" in line]


WARNING = (
    "the loss that was passed to engine.backward ends in a division by 4, which is "
    "training.gradient_accumulation_steps; engine.backward divides by the accumulation window itself: pass the "
    "undivided loss, or the gradients are 4 times too small (ignore this if the division has another purpose)"
)


@pytest.mark.parametrize("how", DIVIDED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loss_that_is_divided_by_hand_is_named_once(backend, how):
    scenarios = tuple((divided, (each, way)) for each in BACKENDS for way in DIVIDED)
    wanted = [WARNING] if how in ("divided", "in place", "by a tensor", "multiplied") else []
    assert values(play(scenarios)[divided, (backend, how)]) == [wanted, []]


# -- runs that train nothing -----------------------------------------------------------------------

MEANS = {
    "mean": lambda output, labels: functional.cross_entropy(output.logits.float(), labels),
    "of the model": lambda output, labels: output.loss,
    "mean of losses": lambda output, labels: functional.cross_entropy(
        output.logits.float(), labels, reduction="none"
    ).mean(),
    "sum": lambda output, labels: functional.cross_entropy(output.logits.float(), labels, reduction="sum"),
    "mean times items": lambda output, labels: output.loss * len(labels),
}


def averaged(backend, how):
    """What is logged of two losses that are passed with the number of their items."""
    with heard() as lines, prepare(config(backend, precision="bf16")) as engine:
        for batch in own_share(2):
            engine.backward(MEANS[how](engine(**batch), batch["labels"]), num_items=len(batch["labels"]))
            engine.step()
    return [line.split(";")[0] for line in lines if "mean" in line]


@pytest.mark.parametrize("how", MEANS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mean_with_num_items_is_named_once(backend, how):
    kind = "MeanBackward0" if how == "mean of losses" else "NllLossBackward0"
    warning = (
        f"the loss that was passed to engine.backward with num_items ends in a mean ({kind}), and the engine divides "
        "it by the number of items again"
    )
    scenarios = tuple((averaged, (each, way)) for each in BACKENDS for way in MEANS)
    assert values(play(scenarios)[averaged, (backend, how)]) == [
        [] if how in ("sum", "mean times items") else [warning],
        [],
    ]


def trained_in_vain(backend, strategy):
    """What is logged of three updates under a schedule of two, and of eight with NaN after one that is finite."""
    schedule = {"name": "linear", "total_steps": 2}
    with heard() as lines, prepare(config(backend, strategy, scheduler=schedule)) as engine:
        train(engine, own_share(4))
    first = [line.split(":")[0] for line in lines if "learning rate" in line]
    with heard() as lines, prepare(config(backend, strategy)) as engine:
        for number, batch in enumerate(own_share(9)):
            scale = 1.0 if number in (0, 4) else float("nan")
            engine.backward(engine(**batch).loss * scale)
            engine.step()
        before = len([line for line in lines if "skipped" in line])
        for batch in own_share(3):
            engine.backward(engine(**batch).loss * float("nan"))
            engine.step()
    return first, before, [line.split(";")[0] for line in lines if "in a row" in line]


VAIN = tuple((trained_in_vain, (backend, strategy)) for backend in BACKENDS for strategy in ("no_shard", "full_shard"))


@pytest.mark.parametrize("cell", VAIN, ids=lambda cell: "-".join(cell[1]))
def test_a_run_that_trains_nothing_is_named_once(cell):
    first, other = values(play(VAIN)[cell])
    assert first[0] == ["update 3 has a learning rate of 0 and trains nothing"]
    assert first[1:] == (0, ["5 updates in a row were skipped, because a gradient is infinite or NaN"])
    assert other == ([], 0, [])


def frozen_late(backend, strategy, by_hand):
    """Losses of a run in which a layer is frozen after the first update."""
    with prepare(config(backend, strategy)) as engine:
        done = train(engine, own_share(1))
        if by_hand:
            engine.module.head.requires_grad_(False)
        else:
            engine.set_trainable("head", False)
        return [loss for loss, _ in (*done, *train(engine, own_share(3)))]


LATE = (("fsdp", "full_shard"), ("deepspeed", "shard_grad_op"), ("deepspeed", "full_shard"), ("fsdp", "no_shard"))
FROZEN = tuple((frozen_late, (*cell, by_hand)) for cell in LATE for by_hand in (True, False))


@pytest.mark.parametrize("cell", LATE[:3], ids="-".join)
def test_a_layer_that_is_frozen_by_hand_is_as_one_that_the_engine_freezes(cell):
    played = play(FROZEN)
    assert values(played[frozen_late, (*cell, True)]) == values(played[frozen_late, (*cell, False)])


def test_distributed_data_parallel_names_a_layer_that_is_frozen_by_hand():
    said = error(play(FROZEN)[frozen_late, (*LATE[3], True)])
    assert said == (
        "ModelError: head.weight was frozen with requires_grad_(False) after prepare, so DistributedDataParallel did "
        "not reduce its bucket; call engine.set_trainable('head.weight', False) instead"
    )


# -- after the engine ------------------------------------------------------------------------------


def closed(backend):
    """What a user gets back, and what stays refused: the weights stay sharded."""
    model = mlp()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(own, 1)
    kinds = type(own), type(scheduler)
    with unishard.prepare(model, config(backend, optimizer=None), own, scheduler) as engine:
        train(engine, own_share(2))
        named = type(scheduler).__name__
    own.zero_grad()
    rate = scheduler.get_last_lr()
    scheduler.step()
    model.to("cpu").zero_grad()
    try:
        model.state_dict()
    except unishard.ContractError as refused:
        said = str(refused)
    return (
        kinds == (type(own), type(scheduler)),
        named,
        math.isclose(rate[0], scheduler.get_last_lr()[0] * 10),
        said.partition(",")[0],
    )


SHARED = nn.ReLU()


def beside(backend):
    """The names that a plain model saves beside a prepared one, and after it is closed."""
    prepared, plain = (nn.Sequential(nn.Linear(4, 4), SHARED, nn.Linear(4, 4)) for _ in range(2))
    with unishard.prepare(prepared, config(backend)):
        found = [*plain.state_dict()]
        plain.load_state_dict(plain.state_dict())
    return found, [*plain.state_dict()]


CLOSED = tuple((scenario, (backend,)) for scenario in (closed, beside) for backend in BACKENDS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_closed_engine_gives_optimizer_and_scheduler_back(backend):
    wanted = (True, "StepLR", True, "state_dict() was called on a prepared Mlp")
    assert values(play(CLOSED)[closed, (backend,)]) == [wanted] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plain_model_is_saved_though_it_shares_an_activation_with_a_prepared_one(backend):
    wanted = ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert values(play(CLOSED)[beside, (backend,)]) == [(wanted, wanted)] * 2
