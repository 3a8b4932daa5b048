"""Ranks that train different parameters: one error on all of them, and never a sum of gradients of different
parameters."""

from __future__ import annotations

import pytest
import torch
from harness import checked, error, my_rank, play, values
from torch import nn
from torch.nn import functional

import unishard


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(12, 8)

    def forward(self, x):
        return torch.tanh(self.up(x))


class Heads(nn.Module):
    """Two tasks with a head each, which stay with the root."""

    def __init__(self, classes):
        super().__init__()
        torch.manual_seed(3)
        self.body = Body()
        self.first, self.second = (nn.Linear(8, number) for number in classes)

    def forward(self, x, tasks):
        features = self.body(x)
        return sum(
            functional.cross_entropy(getattr(self, task)(features).float(), torch.tensor([0, 1])) for task in tasks
        )


EQUAL, OTHER = (3, 3), (3, 5)
BOTH = ("first", "second")
CELLS = (
    ("deepspeed", "shard_optimizer", "fp32"),
    ("deepspeed", "shard_optimizer", "bf16"),
    ("deepspeed", "shard_grad_op", "fp32"),
    ("deepspeed", "full_shard", "fp32"),
    ("fsdp", "no_shard", "fp32"),
    ("fsdp", "no_shard", "bf16"),
    ("fsdp", "shard_grad_op", "fp32"),
    ("fsdp", "full_shard", "bf16"),
)
IDS = {"ids": lambda value: "-".join(value) if isinstance(value[0], str) else str(value[0] != value[1])}


def prepared(classes, backend, strategy, precision="fp32", conditional=(), **sections):
    section = {"strategy": strategy, "conditional_modules": list(conditional)}
    if strategy != "no_shard":
        section["units"] = ["Body"]
    return unishard.prepare(Heads(classes), checked(backend, section, precision=precision, **sections))


def mine(seed=0):
    return torch.randn(2, 12, generator=torch.Generator().manual_seed(10 * seed + my_rank()))


def own_head(classes, backend, strategy, precision):
    """Each rank trains its own task."""
    with prepared(classes, backend, strategy, precision) as engine:
        engine.backward(engine(mine(), [BOTH[my_rank()]]))
        engine.step()


def frozen_by_hand(backend, strategy, precision):
    """One rank freezes a head, past the engine."""
    with prepared(EQUAL, backend, strategy, precision) as engine:
        engine.module.second.requires_grad_(my_rank() == 0)
        engine.backward(engine(mine(), BOTH))


def own_head_later(backend, strategy, precision):
    """The same in the twelfth update, whose calls are not waited for; what is saved afterwards would be wrong."""
    with prepared(EQUAL, backend, strategy, precision) as engine:
        for update in range(12):
            engine.backward(engine(mine(update), [BOTH[my_rank()]] if update == 11 else BOTH))
            engine.step()
        engine.save("never")


def other_order(backend, strategy, precision, *conditional):
    """The same heads on both ranks, in another order."""
    with prepared(EQUAL, backend, strategy, precision, conditional) as engine:
        engine.backward(engine(mine(), BOTH[:: 1 - 2 * my_rank()]))
        return engine.step().grad_norm


def in_turns(backend, strategy, frozen):
    """Each rank trains both heads in a window, in another order, and perhaps freezes one later."""
    with prepared(
        EQUAL, backend, strategy, training={"micro_batch_size": 2, "gradient_accumulation_steps": 2}
    ) as engine:
        for update in range(2):
            for turn in range(2):
                task = BOTH[0] if frozen and update else BOTH[(turn + my_rank()) % 2]
                engine.backward(engine(mine(2 * update + turn), [task]))
                engine.step()
            if frozen:
                engine.weights.set_trainable("second", False)
        return {name: engine.weights.read(name) for name, _ in engine.module.named_parameters()}


def in_turns_of_plain_torch(*, frozen):
    model = Heads(EQUAL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for update in range(2):
        for turn in range(2):
            for rank in range(2):
                task = BOTH[0] if frozen and update else BOTH[(turn + rank) % 2]
                x = torch.randn(2, 12, generator=torch.Generator().manual_seed(10 * (2 * update + turn) + rank))
                (model(x, [task]) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


class Scales(nn.Module):
    """A parameter of the root for each task, and a weight that the model keeps in a list too."""

    def __init__(self):
        super().__init__()
        self.body = Body()
        self.first, self.second = (nn.Parameter(torch.ones(8)) for _ in BOTH)
        self.listed = [self.body.up.weight]

    def forward(self, x, task, *, listed=False):
        features = self.body(x) * getattr(self, task)
        return (features + x @ self.listed[0].t() if listed else features).square().mean()


def prepared_scales(backend, strategy):
    section = strategy if strategy == "no_shard" else {"strategy": strategy, "units": ["Body"]}
    return unishard.prepare(Scales(), checked(backend, section))


def own_scale(backend, strategy):
    """Each rank trains its own parameter of the root."""
    with prepared_scales(backend, strategy) as engine:
        engine.backward(engine(mine(), BOTH[my_rank()]))


def one_forward_more(backend, strategy):
    """Rank 1 runs a second forward before its backward."""
    with prepared_scales(backend, strategy) as engine:
        engine.backward(sum(engine(mine(), task) for task in BOTH[: 1 + my_rank()]))


def from_a_list(backend, strategy):
    """The loss reaches a weight that the forward takes from a list."""
    with prepared_scales(backend, strategy) as engine:
        engine.backward(engine(mine(), "first", listed=True))


SCALES = (("deepspeed", "shard_optimizer"), ("fsdp", "full_shard"))
LATE = (
    ("deepspeed", "shard_optimizer", "fp32"),
    ("deepspeed", "shard_grad_op", "fp32"),
    ("fsdp", "full_shard", "fp32"),
)
ORDERS = (*LATE, ("deepspeed", "shard_optimizer", "bf16"), ("deepspeed", "full_shard", "fp32"))
AS_THEY_COME = (("deepspeed", "shard_grad_op", "fp32"), ("deepspeed", "shard_optimizer", "bf16"))
"""What adds up gradients in the order in which they come."""
TURNS = tuple((backend, "shard_optimizer", frozen) for backend in ("deepspeed", "fsdp") for frozen in (False, True))
SCENARIOS = (
    *((own_head, (classes, *cell)) for cell in CELLS for classes in (EQUAL, OTHER)),
    *((scenario, cell) for scenario in (own_head_later, frozen_by_hand) for cell in LATE),
    *((other_order, cell) for cell in ORDERS),
    *((other_order, (*cell, "Linear")) for cell in AS_THEY_COME),
    *((in_turns, cell) for cell in TURNS),
    *((scenario, cell) for scenario in (own_scale, one_forward_more) for cell in SCALES),
    (from_a_list, SCALES[1]),
)


@pytest.mark.parametrize("classes", [EQUAL, OTHER], **IDS)
@pytest.mark.parametrize("cell", CELLS, **IDS)
def test_ranks_that_train_different_parameters_are_told_before_anything_is_reduced(cell, classes):
    raised = error(play(SCENARIOS)[own_head, (classes, *cell)])
    assert raised.startswith("RankMismatchError: ")
    assert "second (Linear)" in raised
    assert "first (Linear)" in raised
    assert "sharding.conditional_modules: add Linear there" in raised
    if (
        cell[1] != "full_shard" or cell[0] != "deepspeed"
    ):  # which gathers the heads themselves, and so compares them in the forward
        assert (
            "rank 0 is in engine.backward (update 1, micro-batch 1 of 1), without gradients for second (Linear)"
            in raised
        )


@pytest.mark.parametrize("cell", LATE, **IDS)
def test_ranks_that_train_different_parameters_later_save_nothing(cell):
    raised = error(play(SCENARIOS)[own_head_later, cell])
    assert "rank 1 is in engine.step (update 12, micro-batch 1 of 1), without gradients for first (Linear)" in raised


@pytest.mark.parametrize("cell", LATE, **IDS)
def test_a_rank_that_freezes_parameters_by_hand_is_named(cell):
    raised = error(play(SCENARIOS)[frozen_by_hand, cell])
    assert (
        "rank 1 is in engine.backward (update 1, micro-batch 1 of 1), without gradients for second (Linear)" in raised
    )


@pytest.mark.parametrize("cell", ORDERS, **IDS)
def test_gradients_in_another_order_are_refused_where_they_are_added_up_in_that_order(cell):
    played = play(SCENARIOS)[other_order, cell]
    if cell in AS_THEY_COME:
        assert error(played).endswith(
            "came in another order on each rank; all ranks must run the same modules in the same order, except those "
            "of the classes in sharding.conditional_modules"
        )
    elif cell[:2] == ("deepspeed", "full_shard"):  # gathers them in that order
        assert "rank 0 enters first (Linear)" in error(played)
    else:
        assert values(played) == pytest.approx([norm_of_plain_torch()] * 2, rel=1e-5)


def norm_of_plain_torch():
    model = Heads(EQUAL)
    for rank in range(2):
        (model(torch.randn(2, 12, generator=torch.Generator().manual_seed(rank)), BOTH) / 2).backward()
    return torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]).item()


@pytest.mark.parametrize("cell", AS_THEY_COME, **IDS)
def test_gradients_of_conditional_modules_may_come_in_any_order(cell):
    rounding = 1e-5 if cell[2] == "fp32" else 2e-3
    found = values(play(SCENARIOS)[other_order, (*cell, "Linear")])
    assert found == pytest.approx([norm_of_plain_torch()] * 2, rel=rounding)


@pytest.mark.parametrize("cell", TURNS, ids=str)
def test_heads_in_turns_are_those_of_plain_torch_where_a_window_is_reduced_once(cell):
    expected = in_turns_of_plain_torch(frozen=cell[2])
    for found in values(play(SCENARIOS)[in_turns, cell]):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize("cell", SCALES, **IDS)
def test_parameters_of_the_root_need_a_module_that_a_rank_may_skip(cell):
    raised = error(play(SCENARIOS)[own_scale, cell])
    assert (
        "without gradients for second; rank 1 is in engine.backward (update 1, micro-batch 1 of 1), without gradients "
        "for first;" in raised
    )
    assert raised.endswith(
        "sharding.conditional_modules: put such parameters into a module with a forward, and add its class"
    )


@pytest.mark.parametrize("cell", SCALES, **IDS)
def test_a_forward_before_a_backward_is_another_call(cell):
    raised = error(play(SCENARIOS)[one_forward_more, cell])
    assert raised.startswith(
        "RankMismatchError: ranks made different calls and would deadlock: rank 0 is in engine.backward"
    )
    assert raised.endswith("rank 1 is in engine.forward (update 1, micro-batch 1 of 1)")


def test_a_weight_that_was_taken_from_the_model_before_prepare_is_refused_where_the_engine_replaces_it():
    raised = error(play(SCENARIOS)[from_a_list, SCALES[1]])
    assert raised.startswith(
        "ModelError: the loss uses a parameter of shape (8, 12) that was taken from the model before unishard.prepare"
    )
