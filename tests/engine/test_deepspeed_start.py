"""What DeepSpeed is told about the device of a rank, and what it must not be asked on CUDA."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from unishard import BackendError, Topology
from unishard_deepspeed import start
from unishard_deepspeed.private import stages_1_2
from unishard_deepspeed.private.window import WindowGradients

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
RANK = Topology(8, 4, 3, 3, "srun")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """This process's variables come back, also those that DeepSpeed is given."""
    for name in ("DS_ACCELERATOR", "LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def test_on_cuda_deepspeed_takes_the_number_of_the_device_for_the_local_rank(environment):
    environment.setenv("LOCAL_RANK", "3")
    start._set_device(CUDA, RANK)
    assert os.environ["LOCAL_RANK"] == "0"
    assert "OMPI_COMM_WORLD_LOCAL_RANK" not in os.environ
    assert "DS_ACCELERATOR" not in os.environ
    environment.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "3")
    start._set_device(torch.device("cuda", 2), RANK)
    assert (os.environ["LOCAL_RANK"], os.environ["OMPI_COMM_WORLD_LOCAL_RANK"]) == ("2", "2")


def test_on_the_cpu_the_launchers_local_rank_stays(environment):
    start._set_device(CPU, RANK)
    assert (os.environ["LOCAL_RANK"], os.environ["DS_ACCELERATOR"]) == ("3", "cpu")
    environment.setenv("LOCAL_RANK", "1")
    start._set_device(CPU, RANK)
    assert os.environ["LOCAL_RANK"] == "1"


@pytest.mark.parametrize(
    ("accelerator", "device", "message"),
    [
        (
            "cpu",
            CUDA,
            "DS_ACCELERATOR=cpu is set, but this rank computes on cuda; unset DS_ACCELERATOR, or hide the devices",
        ),
        ("cuda", CPU, "DS_ACCELERATOR=cuda is set, but this rank computes on cpu; unset DS_ACCELERATOR$"),
    ],
)
def test_another_kind_of_device_in_the_environment_is_refused(environment, accelerator, device, message):
    environment.setenv("DS_ACCELERATOR", accelerator)
    with pytest.raises(BackendError, match=message):
        start._set_device(device, RANK)


@pytest.fixture
def loaded(environment):
    """Lets DeepSpeed be loaded for a device of this kind."""
    environment.setenv("DS_ACCELERATOR", "cpu")
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    asked: list[str] = []

    def load(device: torch.device) -> list[str]:
        environment.setattr(start, "device_of", lambda topology: device)
        environment.setattr(start, "_set_device", lambda *_: None)
        environment.setattr(type(get_accelerator()), "device_name", lambda self, index=None: device.type)
        environment.delitem(vars(deepspeed.ops), "__compatible_ops__", raising=False)
        environment.setattr(
            deepspeed.ops, "_probe_compatible_ops", lambda: asked.append("compilers") or {"deepspeed_shm_comm": True}
        )
        start.load(RANK)
        return asked

    return load


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_no_op_is_tried_with_the_compilers_of_the_machine(loaded, device):
    """DeepSpeed would compile and link a program in each process, to learn what no training uses."""
    assert loaded(device) == []


def test_the_op_that_only_inference_uses_is_not_compiled(loaded):
    import deepspeed

    loaded(CPU)
    assert deepspeed.ops.__compatible_ops__ == {"deepspeed_shm_comm": False}


def test_deepspeed_imported_for_another_kind_of_device_is_refused(environment):
    environment.setenv("DS_ACCELERATOR", "cpu")
    import deepspeed  # noqa: F401

    environment.setattr(start, "device_of", lambda topology: CUDA)
    environment.setattr(start, "_set_device", lambda *_: None)
    with pytest.raises(BackendError, match=r"DeepSpeed was imported for cpu before .*, which computes on cuda; unset"):
        start.load(RANK)


# -- gradients in host memory ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offload", "cuda", "waits"), [("cpu", True, True), ("cpu", False, False), ("none", True, False)]
)
def test_offloaded_gradients_have_arrived_before_they_are_read_or_dropped(monkeypatch, offload, cuda, waits):
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: calls.append("synchronize"))
    nothing = SimpleNamespace(require=lambda: None)
    zero = SimpleNamespace(
        spec=SimpleNamespace(offloads_optimizer=offload != "none"),
        cases=SimpleNamespace(gradients=nothing, discard=nothing),
        engine=SimpleNamespace(zero_grad=lambda: None),
        reduce_gradients=lambda: calls.append("reduce"),
        gradient_shards=lambda: calls.append("read") or {},
        drop_shards=lambda: calls.append("drop"),
    )
    window = WindowGradients(zero)
    window.reduce()
    window.drop()
    between = ["synchronize"] if waits else []
    assert calls == ["reduce", *between, "read", *between, "drop"]


def test_offloaded_gradients_are_averaged_between_groups_on_the_device(monkeypatch):
    calls: list[object] = []
    copies: list[torch.Tensor] = []
    to = torch.Tensor.to

    def pretended(tensor, device):
        assert device == CUDA
        copies.append(to(tensor, torch.float32, copy=True))
        return copies[-1]

    monkeypatch.setattr(torch.Tensor, "to", pretended)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append(device))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, operation, group: calls.append(tensor) or tensor.mul_(0.5))
    monkeypatch.setattr(stages_1_2, "_ELEMENTS_AT_ONCE", 4)
    gradient = torch.arange(6.0)
    stages_1_2._average_on_host(gradient, "group", CUDA)
    assert gradient.tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert calls[0] == CUDA
    assert [id(tensor) for tensor in calls[1:]] == [id(copy) for copy in copies]
    assert [len(copy) for copy in copies] == [4, 2]
