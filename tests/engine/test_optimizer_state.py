"""Optimizer state made without an update: the same keys in the same form as the optimizer's own, so that it goes on
from there."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import lion_pytorch
import pytest
import torch
from torch import Tensor, nn

from unishard.contract.optimizer_state import StateSpec, fresh_state, keys_of, tensors_and_numbers
from unishard.errors import CheckpointError


class Counting(torch.optim.Optimizer):
    """A user's own class: an int, a float and a tensor for each parameter, and a record that it changes in place."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.seen: set[torch.Size] = set()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                self.seen.add(parameter.shape)
                state = self.state[parameter]
                if not state:
                    state |= {"updates": 0, "decay": 1.0, "sum": torch.zeros_like(parameter), "spare": None}
                state["updates"] += 1
                state["decay"] *= 0.9
                state["sum"].add_(parameter.grad)
                parameter.sub_(state["sum"], alpha=group["lr"] * state["decay"] / state["updates"])


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "adamw for-loop": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=False),
    "adamw, tensor rate": lambda params: torch.optim.AdamW(params, lr=torch.tensor(1e-2), foreach=False),
    "adam amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2),
    "sgd momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.1),
    "lion": lambda params: lion_pytorch.Lion(params, lr=1e-2),
    "nadam": lambda params: torch.optim.NAdam(params, lr=1e-2),
    "radam": lambda params: torch.optim.RAdam(params, lr=1e-2),
    "own": lambda params: Counting(params, lr=1e-2),
}
KEYS = {
    "adamw fused": ({"exp_avg", "exp_avg_sq"}, {"step"}),
    "adamw foreach": ({"exp_avg", "exp_avg_sq"}, {"step"}),
    "adamw for-loop": ({"exp_avg", "exp_avg_sq"}, {"step"}),
    "adamw, tensor rate": ({"exp_avg", "exp_avg_sq"}, {"step"}),
    "adam amsgrad": ({"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}, {"step"}),
    "sgd": (set(), set()),
    "sgd momentum": ({"momentum_buffer"}, set()),
    "adagrad": ({"sum"}, {"step"}),
    "lion": ({"exp_avg"}, set()),
    "nadam": ({"exp_avg", "exp_avg_sq"}, {"step", "mu_product"}),
    "radam": ({"exp_avg", "exp_avg_sq"}, {"step"}),
    "own": ({"sum"}, {"updates", "decay"}),
}


def parameters() -> list[nn.Parameter]:
    """One of two dimensions, one of a single element, one of none: in that, shapes do not tell a step count from a
    moment."""
    generator = torch.Generator().manual_seed(5)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 4), (1,), ())]


def update(optimizer: Any, on: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in on:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape)
        assert torch.equal(one, other)
    else:
        assert one == other


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_first_update_makes_the_keys_that_were_found(name: str) -> None:
    on = parameters()
    optimizer = OPTIMIZERS[name](on)
    keys = keys_of(optimizer, optimizer.param_groups[0])
    assert (set(keys.tensors), set(keys.numbers)) == KEYS[name]
    update(optimizer, on, seed=1)
    for parameter in on:
        tensors, numbers = tensors_and_numbers(
            optimizer, optimizer.param_groups[0], parameter, optimizer.state[parameter]
        )
        assert (set(tensors), set(numbers)) == KEYS[name]
        assert all(tensors[key] is optimizer.state[parameter][key] for key in tensors)
        assert {(number.dtype, number.shape) for number in numbers.values()} <= {(torch.float32, torch.Size())}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_that_was_made_anew_trains_on_bit_by_bit(name: str) -> None:
    on = parameters()
    optimizer = OPTIMIZERS[name](on)
    for seed in range(3):
        update(optimizer, on, seed)

    again = [nn.Parameter(parameter.detach().clone()) for parameter in on]
    resumed = OPTIMIZERS[name](again)
    for parameter, fresh in zip(on, again, strict=True):
        group = optimizer.param_groups[0]
        tensors, numbers = tensors_and_numbers(optimizer, group, parameter, optimizer.state.get(parameter, {}))
        spec = StateSpec(
            {key: value.dtype for key, value in tensors.items()}, {key: float(value) for key, value in numbers.items()}
        )
        state = fresh_state(resumed, resumed.param_groups[0], fresh, spec)
        for key, value in tensors.items():
            assert not state[key].any()
            state[key].copy_(value)
        resumed.state[fresh] = state
        for key, value in optimizer.state.get(parameter, {}).items():
            if key != "decay":  # 0.729, which fp32 rounds
                assert_same(state[key], value)
        for key in numbers:  # never shared between parameters
            assert (
                not isinstance(state[key], Tensor)
                or sum(state[key] is other.get(key) for other in resumed.state.values()) == 1
            )

    for seed in range(3, 6):
        update(optimizer, on, seed)
        update(resumed, again, seed)
    for parameter, fresh in zip(on, again, strict=True):
        assert torch.equal(parameter, fresh)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizer_and_what_hangs_on_its_step_notice_nothing(name: str) -> None:
    on = parameters()
    optimizer = OPTIMIZERS[name](on)
    optimizer.param_groups[0]["lr"] = 0.123  # other options than in the tests before
    optimizer.param_groups[0]["eps"] = 1e-7
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *args: calls.append("before"))
    optimizer.register_step_post_hook(lambda *args: calls.append("after"))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)  # patches `step` of this very object
    original = optimizer.step
    optimizer.step = lambda *args: calls.append("step") or original(*args)
    update(optimizer, on, seed=1)
    calls.clear()
    before, values, epoch = (
        copy.deepcopy(optimizer.state_dict()),
        [parameter.detach().clone() for parameter in on],
        scheduler.last_epoch,
    )
    seen = set(getattr(optimizer, "seen", ()))

    keys_of(optimizer, optimizer.param_groups[0])

    after = optimizer.state_dict()
    assert not calls
    assert scheduler.last_epoch == epoch
    assert repr(after) == repr(before)
    assert set(getattr(optimizer, "seen", ())) == seen
    for parameter, value in zip(on, values, strict=True):
        assert torch.equal(parameter, value)
    assert optimizer.param_groups[0]["params"] == on


def test_options_decide_the_keys() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(2))], "momentum": momentum} for momentum in (0.9, 0.0)]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    assert [set(keys_of(optimizer, group).tensors) for group in optimizer.param_groups] == [{"momentum_buffer"}, set()]


def test_state_takes_the_format_that_was_asked_for() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(5, dtype=torch.bfloat16))], lr=0.1, fused=True)
    like = optimizer.param_groups[0]["params"][0]
    spec = StateSpec({"exp_avg": torch.float32, "exp_avg_sq": torch.bfloat16}, {"step": 7})
    state = fresh_state(optimizer, optimizer.param_groups[0], like, spec)
    assert {key: (value.dtype, value.shape) for key, value in state.items()} == {
        "exp_avg": (torch.float32, torch.Size([5])),
        "exp_avg_sq": (torch.bfloat16, torch.Size([5])),
        "step": (torch.float32, torch.Size()),
    }
    assert state["step"] == 7


class Noisy(torch.optim.SGD):
    """Two ways of keeping state, which no option tells, and noise."""

    def __init__(self, params: Any, *, counts: bool) -> None:
        super().__init__(params, lr=0.1)
        self.counts = counts

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["updates" if self.counts else "noise"] = (
                1 if self.counts else torch.randn(parameter.shape)
            )


def test_optimizers_of_one_class_may_keep_different_keys_and_use_random_numbers() -> None:
    one, other = (Noisy([nn.Parameter(torch.ones(3))], counts=counts) for counts in (True, False))
    before = torch.get_rng_state()
    assert [set(keys_of(each, each.param_groups[0]).tensors) for each in (one, other)] == [set(), {"noise"}]
    assert torch.equal(torch.get_rng_state(), before)


class Freeing(torch.optim.SGD):
    """Holds something outside Python that its copy shares, as DeepSpeedCPUAdam does."""

    def __init__(self, params: Any, freed: Callable[[], None]) -> None:
        super().__init__(params, lr=0.1)
        self.freed = freed

    def __del__(self) -> None:
        self.freed()


def test_what_the_optimizer_frees_when_it_goes_is_not_freed_with_the_copy() -> None:
    freed: list[str] = []
    optimizer = Freeing([nn.Parameter(torch.ones(3))], lambda: freed.append("freed"))
    keys_of(optimizer, optimizer.param_groups[0])
    gc.collect()
    assert not freed
    del optimizer
    gc.collect()
    assert freed == ["freed"]


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return closure()


REFUSED = {
    "rows": (lambda params: torch.optim.Adafactor(params), "the state 'row_var' of Adafactor is a tensor of shape"),
    "closure": (lambda params: NeedsClosure(params, lr=0.1), "the state keys of NeedsClosure cannot be determined"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_found_out_is_refused(what: str) -> None:
    build, message = REFUSED[what]
    optimizer = build([nn.Parameter(torch.ones(3, 4))])
    with pytest.raises(CheckpointError, match=message):
        keys_of(optimizer, optimizer.param_groups[0])


def test_a_number_that_the_optimizer_does_not_keep_is_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1, momentum=0.9)
    like = optimizer.param_groups[0]["params"][0]
    with pytest.raises(CheckpointError, match="the state of SGD has no number 'step', only none"):
        fresh_state(optimizer, optimizer.param_groups[0], like, StateSpec({"exp_avg": torch.float32}, {"step": 3.0}))
