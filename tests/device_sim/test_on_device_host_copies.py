"""An optimizer on copies in host memory: what is copied while the host updates, and what it waits for."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from harness import ADAMW, config, curve, own_share, prepare, train
from simulated_cuda import device
from test_on_device_planted import noticed
from torch.optim.optimizer import register_optimizer_step_pre_hook

from unishard.testing import run_ranks
from unishard_fsdp.cases.host_copies import HostCopies

DEVICE = torch.device("cuda", 0)
COUNT = 3


class Held(NamedTuple):
    """Parameters on the device, and what steps their copies."""

    parameters: list[torch.nn.Parameter]
    optimizer: Any
    copies: HostCopies

    def backward(self) -> None:
        sum(parameter.square().sum() for parameter in self.parameters).backward()

    def end(self) -> None:
        self.copies.gradients.forget()
        for parameter in self.parameters:
            parameter.grad = None


def held() -> Held:
    """Three parameters, each a unit."""
    parameters = [torch.nn.Parameter(torch.full((4,), 1.0 + number, device=DEVICE)) for number in range(COUNT)]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True)
    return Held(
        parameters, optimizer, HostCopies(optimizer, {}, DEVICE, [[each] for each in parameters], pin_memory=True)
    )


def without_a_wait(late: torch.Tensor) -> torch.Tensor:
    """Host memory as it is now."""
    return torch.frombuffer((ctypes.c_float * late.numel()).from_address(late.data_ptr()), dtype=torch.float32).clone()


def copied(work: Any) -> int:
    """Copies to the host, none of which waits."""
    torch.cuda.synchronize()
    device.reset_counts()
    work()
    found = device.counts()
    assert "copies to the host, pageable" not in found
    return int(found.get("copies to the host, pinned", 0))


def test_while_a_unit_is_updated_the_next_come_down_and_those_before_go_up(monkeypatch):
    parameters, optimizer, copies = here = held()
    here.backward()
    with torch.no_grad():
        for parameter in parameters:  # an edit, which an update starts from
            parameter.fill_(7)
    tensors, step, seen = [copies.tensors[each] for each in parameters], optimizer.step, []

    def look() -> None:
        (own,) = optimizer.param_groups[0]["params"]
        number = next(number for number, each in enumerate(tensors) if each is own)
        arrived = [bool((without_a_wait(each) == 7).all()) for each in tensors[number:]]
        seen.append((arrived, copies._up.query()))
        step()

    monkeypatch.setattr(optimizer, "step", look)
    copies.step()
    assert seen == [([True, False, False], True), ([True, False], False), ([True], False)]
    assert not copies._up.query()


def test_gradients_go_down_in_backward_and_once():
    here = held()
    assert copied(here.backward) == COUNT
    assert copied(here.copies.step) == COUNT  # the weights
    here.end()
    assert copied(here.backward) == COUNT


@pytest.mark.parametrize("how", ["change", "hook", "hook on every optimizer", "not the last micro-batch"])
def test_gradients_that_may_be_others_in_the_update_go_down_there(how):
    here, handle = held(), None
    last = how != "not the last micro-batch"
    here.copies.gradients.begin(last=last)
    assert copied(here.backward) == (COUNT if last else 0)
    if how == "change":
        here.copies.gradients.change()
    elif how == "hook":
        handle = here.optimizer.register_step_pre_hook(lambda *step: None)
    elif how == "hook on every optimizer":
        handle = register_optimizer_step_pre_hook(lambda *step: None)
    assert copied(here.copies.step) == 2 * COUNT
    here.end()
    if handle is not None:
        handle.remove()
    here.copies.gradients.begin(last=True)
    assert copied(here.backward) == (0 if last else COUNT)
    here.end()
    assert copied(here.backward) == COUNT


def test_a_gradient_that_a_second_reduction_adds_to_goes_down_again():
    def twice() -> None:
        here = held()
        here.backward()
        here.backward()
        here.copies.step()
        wanted = [torch.nn.Parameter(each.detach().cpu()) for each in held().parameters]
        optimizer = torch.optim.AdamW(wanted, lr=0.1, fused=True)
        for _ in range(2):
            sum(each.square().sum() for each in wanted).backward()
        optimizer.step()
        assert all(torch.equal(own.cpu(), other) for own, other in zip(here.parameters, wanted, strict=True))

    assert noticed(twice) == ""


# ---------------------------------------------------------------- on two ranks

WARM = 12
"""Windows before: in the first ten, guards look closely."""


class Warm(NamedTuple):
    """A run."""

    curve: Any
    counts: dict[str, int]
    """In the last backward and update, where no wait but for an event is allowed."""
    units: int
    shards: int
    """That have elements."""


def a_warm_window(clip: float | None, pinned: bool) -> Warm:
    offload = {"optimizer": "cpu", "pin_memory": pinned}
    training = {"gradient_accumulation_steps": 2, "gradient_clipping": clip}
    with prepare(config("fsdp", optimizer=ADAMW, training=training, offload=offload)) as engine:
        *before, first, last = own_share(2 * WARM + 2)
        done = train(engine, before)
        engine.backward(engine(**first).loss)
        engine.step()
        loss = engine(**last).loss
        torch.cuda.synchronize()
        device.reset_counts()
        torch.cuda.set_sync_debug_mode("error" if pinned else "default")
        engine.backward(loss)
        step = engine.step()
        torch.cuda.set_sync_debug_mode("default")
        counts = device.counts()
        shards = sum(each.to_local().numel() > 0 for each in engine.module.parameters())
        found = curve([*done, (engine.mean(loss), step)])
        return Warm(found, counts, 1 + len(engine.weights.placement().units), shards)


CLIPS = {"no clipping": None, "nothing to clip": 1e6, "clipped": 1e-3}


def on_a_rank() -> dict[tuple[str, bool], Warm]:
    return {(name, pinned): a_warm_window(clip, pinned) for name, clip in CLIPS.items() for pinned in (True, False)}


@cache
def played() -> list[dict[tuple[str, bool], Warm]]:
    return run_ranks(2, on_a_rank, timeout=300)


@pytest.mark.parametrize("clip", CLIPS)
def test_the_host_waits_once_for_each_unit_and_for_no_copy_up(clip):
    for rank in played():
        counts, units, shards = rank[clip, True][1:]
        waits = {name: number for name, number in counts.items() if name.startswith("waits: ")}
        assert waits.keys() == {"waits: event synchronize"}
        assert waits["waits: event synchronize"] <= units + 2  # the norm, and a number of an earlier step
        # Weights and gradients, and the norm; also where clipping changes gradients, since none goes down before.
        assert 0 <= counts["copies to the host, pinned"] - 2 * shards <= 2
        assert counts["copies to the device, pinned"] >= shards
        assert "copies to the host, pageable" not in counts


@pytest.mark.parametrize("clip", CLIPS)
def test_copies_that_do_not_wait_train_as_those_that_do(clip):
    for rank in played():
        assert rank[clip, True].curve == rank[clip, False].curve
