"""Habits from torch and Accelerate that end in a warning, or that only one engine can see."""

from __future__ import annotations

import math
from itertools import product

import torch
from harness import BACKENDS, DEEP, EACH, heard, in_ranks, losses_of, my_rank, own_share, prepare, refused, train
from harness import checked as config
from mistakes.habits import ACCUMULATION
from torch import nn
from torch.nn import functional

import unishard
from unishard.testing.models import mlp

CELLS = tuple(product(BACKENDS, ("no_shard", "full_shard")))


@in_ranks(cells=CELLS)
def test_what_the_engine_does_to_gradients_is_not_refused(backend, strategy):
    """It is no habit."""
    with prepare(config(backend, strategy, training=ACCUMULATION)) as engine:
        for index, batch in enumerate(engine.batches(own_share(6))):
            engine.backward(engine(**batch).loss)
            if index % 2:
                engine.gradients.write("head.weight", torch.zeros_like(engine.gradients.read("head.weight")))
            step = engine.step(clip_grad_norm=1e-3)
        engine.backward(engine(**own_share(1)[0]).loss)
        engine.discard()
        train(engine, own_share(2))
    assert step.updated


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


WARNING = (
    "the loss that was passed to engine.backward ends in a division by 4, which is "
    "training.gradient_accumulation_steps; engine.backward divides by the accumulation window itself: pass the "
    "undivided loss, or the gradients are 4 times too small (ignore this if the division has another purpose)"
)


@in_ranks(cells=tuple(product(BACKENDS, DIVIDED)), in_turn=True)
def test_a_loss_that_is_divided_by_hand_is_named_once(backend, how):
    """In two windows, on rank 0."""
    with heard() as lines, prepare(config(backend, "no_shard", training={"gradient_accumulation_steps": 4})) as engine:
        for batch in engine.batches(own_share(8)):
            engine.backward(DIVIDED[how](engine(**batch).loss))
            engine.step()
    wanted = [WARNING] if how in ("divided", "in place", "by a tensor", "multiplied") else []
    assert [line for line in lines if "division" in line] == ([] if my_rank() else wanted)


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


@in_ranks(cells=tuple(product(BACKENDS, MEANS)), in_turn=True)
def test_a_mean_with_num_items_is_named_once(backend, how):
    """Of two losses that are passed with the number of their items, on rank 0."""
    with heard() as lines, prepare(config(backend, "no_shard", precision="bf16")) as engine:
        for batch in own_share(2):
            engine.backward(MEANS[how](engine(**batch), batch["labels"]), num_items=len(batch["labels"]))
            engine.step()
    kind = "MeanBackward0" if how == "mean of losses" else "NllLossBackward0"
    warning = (
        f"the loss that was passed to engine.backward with num_items ends in a mean ({kind}), and the engine divides "
        "it by the number of items again"
    )
    told = how not in ("sum", "mean times items") and my_rank() == 0
    assert [line.split(";")[0] for line in lines if "mean" in line] == [warning] * told


@in_ranks(cells=CELLS if DEEP else (CELLS[0], CELLS[3]))
def test_a_run_that_trains_nothing_is_named_once(backend, strategy):
    """Three updates under a schedule of two, and eight with NaN after one that is finite; on rank 0."""
    schedule = {"name": "linear", "total_steps": 2}
    with heard() as lines, prepare(config(backend, strategy, scheduler=schedule)) as engine:
        train(engine, own_share(4))
    first = [line.split(":")[0] for line in lines if "learning rate" in line]
    with heard() as lines, prepare(config(backend, strategy)) as engine:
        for number, batch in enumerate(own_share(9)):
            scale = 1.0 if number in (0, 4) else float("nan")
            engine.backward(engine(**batch).loss * scale)
            engine.step()
        before = [line for line in lines if "skipped" in line]
        for batch in own_share(3):
            engine.backward(engine(**batch).loss * float("nan"))
            engine.step()
    main = my_rank() == 0
    assert first == ["update 3 has a learning rate of 0 and trains nothing"] * main
    assert before == []
    skipped = [line.split(";")[0] for line in lines if "in a row" in line]
    assert skipped == ["5 updates in a row were skipped, because a gradient is infinite or NaN"] * main


def frozen_late(backend, strategy, by_hand):
    """Losses of a run in which a layer is frozen after the first update."""
    with prepare(config(backend, strategy)) as engine:
        losses = losses_of(engine, own_share(1))
        if by_hand:
            engine.module.head.requires_grad_(False)
        else:
            engine.weights.set_trainable("head", False)
        return losses + losses_of(engine, own_share(3))


@in_ranks(cells=(("fsdp", "full_shard"), ("deepspeed", "shard_grad_op"), ("deepspeed", "full_shard")))
def test_a_layer_that_is_frozen_by_hand_is_as_one_that_the_engine_freezes(backend, strategy):
    assert frozen_late(backend, strategy, True) == frozen_late(backend, strategy, False)


@in_ranks
def test_distributed_data_parallel_names_a_layer_that_is_frozen_by_hand():
    assert refused(frozen_late, "fsdp", "no_shard", True) == (
        "ModelError: head.weight was frozen with requires_grad_(False) after prepare, so DistributedDataParallel did "
        "not reduce its bucket; call engine.weights.set_trainable('head.weight', False) instead"
    )


# -- after the engine ------------------------------------------------------------------------------


@in_ranks(cells=EACH)
def test_a_closed_engine_gives_optimizer_and_scheduler_back(backend):
    """The weights stay sharded, which stays refused."""
    model = mlp()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(own, 1)
    kinds = type(own), type(scheduler)
    with unishard.prepare(model, config(backend, optimizer=None), own, scheduler) as engine:
        train(engine, own_share(2))
        named = type(scheduler).__name__
    own.zero_grad()
    (rate,) = scheduler.get_last_lr()
    scheduler.step()
    model.to("cpu").zero_grad()
    said = refused(model.state_dict)
    assert kinds == (type(own), type(scheduler))
    assert named == "StepLR"
    assert math.isclose(rate, scheduler.get_last_lr()[0] * 10)
    assert said.startswith("ContractError: state_dict() was called on a prepared Mlp,")


SHARED = nn.ReLU()


@in_ranks(cells=EACH, in_turn=True)
def test_a_plain_model_is_saved_though_it_shares_an_activation_with_a_prepared_one(backend):
    """Beside it, and after it is closed."""
    prepared, plain = (nn.Sequential(nn.Linear(4, 4), SHARED, nn.Linear(4, 4)) for _ in range(2))
    with unishard.prepare(prepared, config(backend)):
        beside = [*plain.state_dict()]
        plain.load_state_dict(plain.state_dict())
    assert beside == [*plain.state_dict()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
