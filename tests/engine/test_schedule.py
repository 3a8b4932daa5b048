"""The schedule is transformers' own or DeepSpeed's, one step for each real update."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_inverse_sqrt_schedule,
    get_linear_schedule_with_warmup,
    get_wsd_schedule,
)

from unishard.config import Scheduler
from unishard.contract.training_facts import ScheduleFacts
from unishard.engine.optim.schedule import Schedule
from unishard_deepspeed.start import quiet


def optimizer(lr: float = 0.1) -> torch.optim.Optimizer:
    first, second = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    return torch.optim.SGD([{"params": [first], "lr": lr}, {"params": [second]}], lr=1.0)


def ours(section: dict[str, object], updates: int) -> list[list[float]]:
    steps = optimizer()
    schedule = Schedule(Scheduler.model_validate(section), steps.param_groups)
    rates = []
    for _ in range(updates):
        rates.append([group["lr"] for group in steps.param_groups])
        schedule.advance()
    return rates


def theirs(make: object, updates: int) -> list[list[float]]:
    steps = optimizer()
    schedule = make(steps)  # type: ignore[operator]
    rates = []
    for _ in range(updates):
        rates.append([group["lr"] for group in steps.param_groups])
        steps.step()
        schedule.step()
    return rates


@pytest.mark.parametrize(
    ("section", "make"),
    [
        ({"name": "constant", "warmup_steps": 4}, lambda o: get_constant_schedule_with_warmup(o, 4)),
        ({"name": "linear", "warmup_steps": 3, "total_steps": 12}, lambda o: get_linear_schedule_with_warmup(o, 3, 12)),
        ({"name": "inverse_sqrt", "warmup_steps": 4}, lambda o: get_inverse_sqrt_schedule(o, 4)),
        ({"name": "inverse_sqrt"}, lambda o: get_inverse_sqrt_schedule(o, 0)),
        ({"name": "linear", "total_steps": 12}, lambda o: get_linear_schedule_with_warmup(o, 0, 12)),
        (
            {"name": "cosine", "warmup_steps": 3, "total_steps": 12, "min_lr_ratio": 0.1},
            lambda o: get_cosine_with_min_lr_schedule_with_warmup(o, 3, 12, min_lr_rate=0.1),
        ),
    ],
    ids=["constant", "linear with warm-up", "inverse sqrt with warm-up", "inverse sqrt", "linear", "cosine"],
)
def test_equals_transformers(section: dict[str, object], make: object) -> None:
    for mine, other in zip(ours(section, 12), theirs(make, 12), strict=True):
        assert mine == pytest.approx(other, rel=1e-12, abs=1e-15)


lengths = st.integers(0, 12)
ends = st.sampled_from((0.0, 1 / 3, 1.0)) | st.floats(0, 1)


@given(lengths, lengths, st.integers(1, 12), st.sampled_from(("linear", "cosine", "1-sqrt")), ends)
@example(0, 0, 1, "cosine", 0.0)
def test_equals_transformers_through_all_stages(warm: int, stable: int, falls: int, kind: str, end: float) -> None:
    total = warm + stable + falls
    section = {"name": "wsd", "warmup_steps": warm, "total_steps": total, "decay_steps": falls}
    section |= {"decay_type": kind.removeprefix("1-"), "min_lr_ratio": end} | (
        {"warmup_start_ratio": end} if warm else {}
    )
    other = theirs(lambda o: get_wsd_schedule(o, warm, falls, total, decay_type=kind, min_lr_ratio=end), total + 3)
    assert ours(section, total + 3) == other


def test_a_square_root_falls_fast_at_first() -> None:
    rates = ours({"name": "wsd", "total_steps": 8, "decay_steps": 4, "decay_type": "sqrt", "min_lr_ratio": 0.5}, 10)
    shape = [1.0] * 5 + [0.75, 1 - 0.125**0.5, 1 - 3**0.5 / 4, 0.5, 0.5]
    assert [row[1] for row in rates] == pytest.approx(shape, rel=1e-15)


def test_a_run_that_goes_on_from_its_stable_phase_is_the_longer_run() -> None:
    """What was trained before the decay has the rates of any `total_steps`."""
    section = {"name": "wsd", "warmup_steps": 2, "decay_steps": 4}
    longer = ours({**section, "total_steps": 20}, 20)
    assert ours({**section, "total_steps": 10}, 7) == longer[:7]
    steps = optimizer()
    first = Schedule(Scheduler.model_validate({**section, "total_steps": 10}), steps.param_groups)
    for _ in range(6):
        first.advance()
    second = Schedule(Scheduler.model_validate({**section, "total_steps": 20}), (again := optimizer()).param_groups)
    second.resume(ScheduleFacts(**first.facts()), None)
    for row in longer[6:]:
        assert [group["lr"] for group in again.param_groups] == row
        second.advance()


def test_after_the_end_the_rate_stays_at_its_floor() -> None:
    rates = ours({"name": "linear", "total_steps": 4, "min_lr_ratio": 0.25}, 8)
    assert [row[0] for row in rates[4:]] == pytest.approx([0.025] * 4)


def test_a_constant_schedule_leaves_a_rate_that_the_user_sets() -> None:
    steps = optimizer()
    schedule = Schedule(Scheduler(), steps.param_groups)
    steps.param_groups[0]["lr"] = 0.5
    schedule.advance()
    assert schedule.lr == 0.5


@pytest.mark.parametrize("climb", ["log", "linear"])
def test_equals_deepspeed(climb: str) -> None:
    """As DeepSpeed's engine drives its schedules: made before the first update, stepped after each."""
    with quiet():
        from deepspeed.runtime import lr_schedules

    warm = {"warmup_steps": 4, "warmup_type": climb, "warmup_start_ratio": 0.25, "delay_steps": 1}
    for section, theirs_, params in (
        ({"name": "constant"}, lr_schedules.WarmupLR, {}),
        (
            {"name": "linear", "total_steps": 9, "min_lr_ratio": 0.25},
            lr_schedules.WarmupDecayLR,
            {"total_num_steps": 9},
        ),
    ):
        mine = [row[0] for row in ours(section | warm, 13)]
        peak = optimizer().param_groups[0]["lr"]
        settings = {"warmup_min_lr": peak / 4, "warmup_max_lr": peak, "warmup_num_steps": 4, "warmup_type": climb}
        other = theirs(
            lambda steps, make=theirs_, params=params, settings=settings: make(steps, **settings, **params), 13
        )
        assert mine == pytest.approx([row[0] for row in other], rel=1e-12)
