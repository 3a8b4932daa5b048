"""How the process group is started on CUDA, and how it ends: which calls of torch are made."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from unishard import ConfigError, Topology
from unishard.contract import private_api
from unishard.distributed import devices, process_group
from unishard.failures import lifetime


@pytest.fixture
def torch_calls(monkeypatch):
    """What is asked of torch, on a node that shows four CUDA devices."""
    calls: list[tuple[str, object]] = []
    monkeypatch.setattr(devices, "_own", None)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)  # whatever ran in this process before
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: calls.append(("set_device", index)))
    monkeypatch.setattr(devices, "refuse_shared", lambda index: calls.append(("refuse_shared", index)))
    monkeypatch.setattr(
        dist, "init_process_group", lambda *backend, **options: calls.append(("init", (*backend, options)))
    )
    monkeypatch.setattr(lifetime.atexit, "register", lambda function: None)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    return calls


RANK = Topology(4, 4, 2, 2, "torchrun")


def test_a_cuda_rank_takes_its_device_and_starts_nccl_with_a_timeout(torch_calls):
    assert lifetime.ensure(RANK) == RANK
    assert torch_calls[0] == ("set_device", 2)
    backend, options = torch_calls[1][1]
    assert backend == "cpu:gloo,cuda:nccl"
    assert options["timeout"] == process_group.DEFAULT
    assert "device_id" not in options
    assert torch_calls[2:] == [("refuse_shared", 0)]
    assert devices.device_of(RANK) == torch.device("cuda", 2)


@pytest.fixture
def callers_group(monkeypatch):
    def start(backends: str) -> None:
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
        monkeypatch.setattr(dist, "get_rank", lambda: 6)
        monkeypatch.setattr(dist, "get_world_size", lambda: 8)

    return start


def test_a_rank_in_a_group_of_the_callers_takes_its_device_too(torch_calls, callers_group):
    callers_group("cuda:nccl")
    found = lifetime.ensure(RANK)
    assert (found.rank, found.world_size, found.local_rank) == (6, 8, 2)
    assert torch_calls == [("set_device", 2)]


def test_ranks_share_devices_only_in_a_gloo_group_of_the_callers(torch_calls, callers_group):
    seventh = Topology(8, 8, 6, 6, "torchrun")
    callers_group("cpu:gloo,cuda:gloo")
    lifetime.ensure(seventh)
    assert torch_calls == [("set_device", 2)]
    callers_group("cpu:gloo,cuda:nccl")
    with pytest.raises(ConfigError, match="local rank 6 has no CUDA device: the node shows only 4"):
        lifetime.ensure(seventh)


@pytest.mark.parametrize(
    ("backends", "device"), [("cuda:nccl", "cuda:2"), ("cpu:gloo,cuda:nccl", "cpu"), ("cpu:gloo,cuda:gloo", "cpu")]
)
def test_small_numbers_travel_where_the_group_carries_them(torch_calls, callers_group, backends, device):
    callers_group(backends)
    lifetime.ensure(RANK)
    assert devices.of_numbers() == torch.device(device)  # in a background thread too, where torch's current device is 0


@pytest.fixture
def ending(monkeypatch, callers_group):
    """How a group of these backends is ended."""
    calls: list[str] = []
    monkeypatch.setattr(lifetime, "_failed", False)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("destroyed"))
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: calls.append("aborted"))

    def end(backends: str) -> list[str]:
        callers_group(backends)
        lifetime.shutdown()
        return calls

    return end


@pytest.mark.parametrize(
    ("error", "backends", "how"),
    [
        (ValueError(), "cpu:gloo,cuda:nccl", "aborted"),
        (KeyboardInterrupt(), "cpu:gloo,cuda:nccl", "aborted"),
        (ValueError(), "cpu:gloo,cuda:gloo", "destroyed"),
        (None, "cpu:gloo,cuda:nccl", "destroyed"),
        (SystemExit(85), "cpu:gloo,cuda:nccl", "destroyed"),  # all ranks have saved
    ],
)
def test_after_an_error_nccl_is_aborted_instead_of_waited_for(ending, error, backends, how):
    lifetime.ended_by(error)
    lifetime.ended_by(None)
    assert ending(backends) == [how]
    assert ending("cpu:gloo,cuda:nccl")[1:] == ["destroyed"]


def test_so_it_is_after_an_error_outside_any_engine(ending, monkeypatch):
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    assert ending("cpu:gloo,cuda:nccl") == ["aborted"]


def test_without_torchs_own_function_the_default_group_is_aborted(ending, monkeypatch):
    aborted = []
    monkeypatch.delattr(dist.distributed_c10d, "_abort_process_group")
    monkeypatch.setattr(private_api, "_absent", private_api._absent.__wrapped__)  # not what was found before
    monkeypatch.setattr(
        process_group.dist, "group", SimpleNamespace(WORLD=SimpleNamespace(abort=lambda: aborted.append(1)))
    )
    lifetime.ended_by(ValueError())
    assert ending("cuda:nccl") == []
    assert aborted == [1]
