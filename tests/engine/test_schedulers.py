"""Which scheduler objects are taken, and when they step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR

from unishard.config import Config
from unishard.contract.training_facts import GroupRecord, ScheduleFacts
from unishard.engine.optim.saved_groups import SavedGroups, match
from unishard.engine.optim.schedulers import build_scheduler, check
from unishard.engine.optim.torch_schedule import TorchSchedule
from unishard.engine.resolve import setup_of
from unishard.errors import CheckpointError, ConfigError


def optimizer(lr: Any = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


ONE = optimizer()


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (3, r"is a int; pass a torch\.optim\.lr_scheduler\.LRScheduler, or a function that builds one"),
        (
            ReduceLROnPlateau(ONE),
            r"ReduceLROnPlateau needs a metric, which is not available in an update; build it on engine.optimizer",
        ),
        (
            StepLR(optimizer(), 1),
            "StepLR belongs to an optimizer that was not passed to prepare; pass that optimizer too, or",
        ),
    ],
    ids=["number", "needs a metric", "another optimizer"],
)
def test_refused(scheduler: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"scheduler: {message}"):
        check(scheduler, ONE)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda built: None, "function returned NoneType; it must return a torch"),
        (ReduceLROnPlateau, "ReduceLROnPlateau needs a metric"),
        (
            lambda built: StepLR(optimizer(), 1),
            "function returned a StepLR of another optimizer; build it from the function's argument",
        ),
    ],
    ids=["nothing", "needs a metric", "another optimizer"],
)
def test_a_function_that_returns_something_else(build: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"scheduler: {message}"):
        build_scheduler(build, ONE)


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_nothing_is_given_twice(section: str) -> None:
    cfg = Config.model_validate(
        {"sharding": "no_shard", section: {"name": "adamw" if section == "optimizer" else "constant"}}
    )
    model = torch.nn.Linear(1, 1)
    own = torch.optim.SGD(model.parameters(), lr=1.0)
    given = {"optimizer": (own, None), "scheduler": (None, lambda built: StepLR(built, 1))}[section]
    with pytest.raises(
        ConfigError, match=f"{section}: is in the config and was also passed to prepare; remove one of them"
    ):
        setup_of(cfg, model, *given)


def test_an_object_on_an_object_and_a_function_on_the_config_s() -> None:
    model = torch.nn.Linear(1, 1)
    own = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = StepLR(own, 1)
    recipe = setup_of(Config.model_validate({}), model, own, scheduler)
    assert recipe(model.named_parameters()) is own
    assert recipe.scheduler is scheduler
    recipe = setup_of(Config.model_validate({}), model, None, lambda built: StepLR(built, 1))
    assert recipe.scheduler is None
    built = recipe(model.named_parameters())
    assert recipe.scheduler is not None
    assert recipe.scheduler.optimizer is built


def test_steps_once_for_each_update() -> None:
    own = optimizer()
    parts = [LambdaLR(own, lambda i: (i + 1) / 2), StepLR(own, 1, 0.5)]
    schedule = TorchSchedule(SequentialLR(own, parts, milestones=[2]), own.param_groups)
    rates = []
    for _ in range(5):
        rates.append(schedule.lr)
        own.step()
        schedule.advance()
    assert rates == [0.5, 1.0, 1.0, 0.5, 0.25]


def test_rates_stay_numbers() -> None:
    own = optimizer(torch.tensor(1.0))
    scheduler = LambdaLR(own, lambda i: 1 / (i + 1))
    own.param_groups[0]["lr"] = 1.0
    schedule = TorchSchedule(scheduler, own.param_groups)
    own.step()
    schedule.advance()
    assert own.param_groups[0]["lr"] == 0.5
    assert isinstance(own.param_groups[0]["lr"], float)


def running(build: Any, updates: int, groups: int = 1) -> tuple[torch.optim.Optimizer, TorchSchedule]:
    each = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(groups)]
    stepped = torch.optim.SGD(each, lr=1.0, momentum=0.9)
    schedule = TorchSchedule(build(stepped), stepped.param_groups)
    for _ in range(updates):
        stepped.step()
        schedule.advance()
    return stepped, schedule


def cycle(stepped: torch.optim.Optimizer) -> Any:
    return OneCycleLR(stepped, max_lr=2.0, total_steps=20)


def stairs(stepped: torch.optim.Optimizer) -> Any:
    return StepLR(stepped, 2)


@pytest.mark.parametrize(
    "build",
    [stairs, cycle, lambda stepped: SequentialLR(stepped, [stairs(stepped), cycle(stepped)], [2])],
    ids=["rate alone", "momentum too", "inside another"],
)
@pytest.mark.parametrize("before", [0, 5], ids=["new", "further"])
def test_goes_on_with_everything_that_it_writes(build: Any, before: int) -> None:
    then, saved = running(build, 3)
    facts = ScheduleFacts(**saved.facts())
    now, resumed = running(build, before)
    resumed.resume(facts, SavedGroups((0,), (options_of(then),)))
    for _ in range(4):
        assert {**now.param_groups[0], "params": None} == {**then.param_groups[0], "params": None}
        saved.advance()
        resumed.advance()


def options_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}


@pytest.mark.parametrize(
    "build",
    [
        stairs,
        lambda stepped: LambdaLR(stepped, lambda update: 1 / (update + 1)),
        lambda stepped: CyclicLR(stepped, 0.1, 2.0, step_size_up=3),
        lambda stepped: SequentialLR(stepped, [stairs(stepped), cycle(stepped)], [2]),
    ],
    ids=["rate", "function", "limits", "inside another"],
)
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1)], ids=["divided", "joined"])
def test_goes_on_where_groups_are_divided_otherwise(build: Any, before: int, after: int) -> None:
    then, saved = running(build, 3, before)
    facts = ScheduleFacts(**saved.facts())
    now, resumed = running(build, 0, after)
    resumed.resume(facts, SavedGroups((0,) * after, (options_of(then),) * after))
    for _ in range(6):
        assert [{**group, "params": 0} for group in now.param_groups] == [{**then.param_groups[0], "params": 0}] * after
        saved.advance()
        resumed.advance()


def test_keeps_its_own_rates_where_groups_differ() -> None:
    _, saved = running(lambda stepped: LambdaLR(stepped, lambda update: 1 / (update + 1)), 3)
    now, resumed = running(lambda stepped: LambdaLR(stepped, lambda update: 1 / (update + 1)), 0, 2)
    resumed.resume(ScheduleFacts(**saved.facts()), None)
    resumed.advance()
    assert [group["lr"] for group in now.param_groups] == [0.2, 0.2]


def test_groups_are_found_by_their_parameters() -> None:
    def record(names: str, lr: float) -> GroupRecord:
        return GroupRecord(names=[*names], options={"lr": lr})

    then = [record("ab", 1.0), record("cd", 1.0), record("", 2.0), record("e", 3.0)]
    assert match(then, ["abcd", "e", ""]) == SavedGroups((0, 3, 2), ({"lr": 1.0}, {"lr": 3.0}, {"lr": 2.0}))
    assert match(then, ["a", "b", "cd", "e"]) is not None
    assert match(then, ["abcde"]) is None  # rates differ
    assert match(then, ["abcd"]) is None  # one is gone
    assert match(then, ["abcdef"]) is None  # one is new


def test_after_another_schedule_it_makes_as_many_updates_or_says_that_it_cannot() -> None:
    _, expected = running(stairs, 3)
    _, new = running(stairs, 0)
    new.resume(ScheduleFacts(updates=3, peaks=[1.0]), None)
    assert new.lr == expected.lr
    with pytest.raises(CheckpointError, match=r"StepLR is at update 3 and cannot go back to 2"):
        new.resume(ScheduleFacts(updates=2, peaks=[1.0]), None)


def test_other_parts_are_another_schedule() -> None:
    def chained(parts: int) -> Any:
        return lambda stepped: SequentialLR(stepped, [stairs(stepped) for _ in range(parts)], [*range(5, 4 * parts, 4)])

    _, saved = running(chained(3), 3)
    _, expected = running(chained(2), 3)
    _, resumed = running(chained(2), 0)
    resumed.resume(ScheduleFacts(**saved.facts()), None)
    assert resumed.lr == expected.lr
