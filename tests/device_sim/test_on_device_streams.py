"""The simulated device itself: it is as late as it may be, it finds what nobody waits for, and it refuses what CUDA
refuses."""

from __future__ import annotations

import copy
import ctypes
import os
import subprocess
import sys
import time

import pytest
import torch
from planting import noticed
from simulated_cuda import device

DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _settled():
    yield
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("default")


def pinned(*values):
    return torch.tensor(values).pin_memory()


def test_it_says_that_it_is_no_gpu():
    assert torch.cuda.get_device_name().endswith("(simulated)")
    assert torch.cuda.device_count() == 2


def test_nothing_runs_before_someone_waits():
    late = torch.empty(3, pin_memory=True)
    late.copy_(torch.ones(3, device=DEVICE), non_blocking=True)
    raw = torch.frombuffer((ctypes.c_float * 3).from_address(late.data_ptr()), dtype=torch.float32)
    assert raw.isnan().all()
    torch.cuda.current_stream().synchronize()
    assert late.tolist() == [1, 1, 1]


def test_work_that_nobody_waits_for_is_done_after_its_patience():
    event = torch.ones(3, device=DEVICE).add(1) is not None and torch.cuda.current_stream().record_event()
    deadline = time.monotonic() + 30
    while not event.query():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_memory_is_nan_until_it_is_written():
    assert torch.empty(5, device=DEVICE).isnan().all().item()
    assert torch.empty(5, pin_memory=True).isnan().all()


def test_two_accesses_without_an_order_are_named_with_both_places():
    side = torch.cuda.Stream()

    def scenario():
        values = torch.ones(4, device=DEVICE)
        with torch.cuda.stream(side):
            values * 2

    said = noticed(scenario)
    assert "aten::mul" in said
    assert "without a wait for aten::fill_" in said
    assert said.count("test_on_device_streams.py:") == 2


def test_two_halves_of_one_block_are_no_race():
    side = torch.cuda.Stream()
    values = torch.ones(8, device=DEVICE)
    side.wait_stream(torch.cuda.current_stream())

    def scenario():
        values[:4].add_(1)
        with torch.cuda.stream(side):
            values[4:].add_(1)

    assert noticed(scenario) == ""


@pytest.mark.parametrize("recorded", [True, False])
def test_memory_that_another_stream_still_uses_is_not_given_away(recorded):
    side = torch.cuda.Stream()

    def scenario():
        values = torch.ones(4, device=DEVICE)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            values + 1
        if recorded:
            values.record_stream(side)
        del values
        torch.ones(4, device=DEVICE)

    assert ("needs record_stream" in noticed(scenario)) is not recorded


@pytest.mark.parametrize(
    "read", [torch.Tensor.sum, torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.clone, torch.Tensor.zero_]
)
@pytest.mark.parametrize("waits", [True, False])
def test_the_host_waits_before_it_uses_what_is_copied(read, waits):
    def scenario():
        late = torch.empty(3, pin_memory=True)
        late.copy_(torch.ones(3, device=DEVICE), non_blocking=True)
        event = torch.cuda.current_stream().record_event()
        if waits:
            event.synchronize()
        read(late)

    assert ("pinned memory" in noticed(scenario)) is not waits


@pytest.mark.parametrize("waits", [True, False])
def test_the_host_waits_before_it_overwrites_what_is_copied(waits):
    def scenario():
        source = pinned(1.0, 2.0)
        source.to(DEVICE, non_blocking=True)
        if waits:
            torch.cuda.synchronize()
        source.fill_(3.0)

    assert ("aten::fill_ on the host" in noticed(scenario)) is not waits


def test_pageable_memory_is_read_before_the_copy_returns():
    source = torch.ones(3)
    there = source.to(DEVICE, non_blocking=True)
    source.fill_(7)
    assert there.tolist() == [1, 1, 1]


def test_a_tensor_of_the_host_is_refused_as_on_cuda():
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(2, device=DEVICE).add_(torch.ones(2))
    assert torch.ones(2, device=DEVICE).add(torch.tensor(1.0)).tolist() == [2, 2]


@pytest.mark.parametrize(
    "wait",
    [
        lambda tensor: tensor.item(),
        lambda tensor: tensor.cpu(),
        lambda tensor: tensor.nonzero(),
        lambda tensor: tensor[tensor > 0],
        lambda tensor: bool(tensor),
        lambda tensor: torch.ones(1).to(tensor.device),
        lambda tensor: torch.cuda.current_stream().synchronize(),
    ],
)
def test_a_wait_of_the_host_is_refused_where_it_is_asked_to_be(wait):
    one = torch.ones(1, device=DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        wait(one)
    torch.cuda.set_sync_debug_mode("default")
    wait(one)


def test_what_does_not_wait_is_not_refused():
    torch.cuda.set_sync_debug_mode("error")
    values = pinned(1.0, 2.0).to(DEVICE, non_blocking=True)
    torch.nn.functional.softmax(values * 2, 0).sum().add_(1)


def test_a_model_is_copied_with_its_memory():
    model = torch.nn.Linear(3, 2, device=DEVICE)
    other = copy.deepcopy(model)
    with torch.no_grad():
        model.weight.zero_()
    assert other.weight.ne(0).all().item()


def test_random_numbers_follow_their_generator():
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    first = torch.randn(4, device=DEVICE).tolist()
    torch.cuda.set_rng_state(state)
    assert torch.randn(4, device=DEVICE).tolist() == first
    assert torch.randn(4, device=DEVICE).tolist() != first


def test_a_forked_process_cannot_use_it():
    torch.cuda.synchronize()
    torch.ones(1, device=DEVICE).item()
    child = os.fork()
    if child == 0:
        os._exit(7 if device.in_bad_fork() else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("1", 1), ("0,1", 2), ("1,5", 1)])
def test_a_process_sees_the_devices_that_are_visible_to_it(visible, count):
    code = "import torch; print(torch.cuda.device_count(), torch.cuda.is_available())"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": visible}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split() == [str(count), str(count > 0)]


def test_a_plain_loop_has_the_losses_of_the_cpu():
    def losses(where):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3)
        ).to(where)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        data, labels = torch.randn(6, 5).to(where), torch.tensor([0, 1, 2, 0, 1, 2]).to(where)
        found = []
        for _ in range(4):
            loss = torch.nn.functional.cross_entropy(model(data), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return [loss.item() for loss in found]

    assert losses(DEVICE) == pytest.approx(losses("cpu"), rel=1e-6)
