"""The CUDA device of a rank, on machines that are pretended."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from unishard import ConfigError, Topology
from unishard.config import Offload
from unishard.distributed import devices


@pytest.fixture
def machine(monkeypatch):
    """Pretends CUDA devices, and the one that is current."""

    def pretend(count: int, current: int = 0) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: current)

    return pretend


def rank(local: int, launcher: str = "torchrun") -> Topology:
    return Topology(8, 4, local, local, launcher)


@pytest.mark.parametrize(
    ("count", "current", "topology", "chosen"),
    [
        (4, 0, rank(0), 0),
        (4, 0, rank(3), 3),
        (1, 0, rank(3, "srun"), 0),  # srun --gpus-per-task=1
        (4, 2, rank(3), 2),  # the caller has set it
        (4, 0, rank(0, "python"), 0),
        (4, 2, rank(0, "python"), 2),
    ],
)
def test_the_device_of_a_rank(machine, count, current, topology, chosen):
    machine(count, current)
    assert devices.choose(topology, shared=False) == devices.choose(topology, shared=True) == chosen


def test_fewer_devices_than_ranks_are_one_clear_error_unless_ranks_may_share(machine):
    machine(2)
    assert [devices.choose(rank(local), shared=True) for local in range(4)] == [0, 1, 0, 1]
    assert devices.choose(rank(1), shared=False) == 1
    with pytest.raises(ConfigError) as refused:
        devices.choose(rank(2), shared=False)
    assert "local rank 2 has no CUDA device: the node shows only 2" in str(refused.value)
    assert "torchrun --nproc-per-node=2" in str(refused.value)
    assert 'init_process_group("gloo")' in str(refused.value)


@pytest.mark.parametrize("shared", [False, True])
def test_two_ranks_on_one_device_are_named(monkeypatch, shared):
    found = [("one", "a"), ("two", "a"), ("one", "b"), ("one", "a" if shared else "c")]

    def gather(into, mine):
        assert mine == (devices.socket.gethostname(), "GPU-1")
        into[:] = found

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"GPU-{index}"))
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    if not shared:
        devices.refuse_shared(1)
        return
    with pytest.raises(
        ConfigError, match="ranks 0 and 3 use the same CUDA device of one, which NCCL does not support; start one rank"
    ):
        devices.refuse_shared(1)


@pytest.mark.parametrize(
    ("offload", "threads", "elastic", "count", "wanted"),
    [
        ("cpu", "1", True, 4, [4]),
        ({"params": "cpu"}, "1", True, 4, [4]),
        ("none", "1", True, 4, []),
        ("cpu", "2", True, 4, []),  # the user has chosen
        ("cpu", "1", False, 4, []),
        ("cpu", "1", True, 0, []),  # the model computes on the host too
    ],
)
def test_an_offloaded_optimizer_gets_the_cores_that_torchrun_takes_from_it(
    machine, monkeypatch, offload, threads, elastic, count, wanted
):
    machine(count)
    chosen: list[int] = []
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: elastic)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(18)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    devices.use_host_cores(Offload.model_validate(offload), rank(0))
    assert chosen == wanted
