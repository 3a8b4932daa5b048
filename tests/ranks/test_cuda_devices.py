"""Ranks on real CUDA devices: one with NCCL, and two that share a device over gloo."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from harness import BACKENDS, curve, own_share, prepare, train
from harness import checked as config

from unishard.testing import run_ranks
from unishard_fsdp.cases.host_copies import HostCopies

pytestmark = pytest.mark.gpu


def on_one_device(backend):
    with prepare(config(backend)) as engine:
        losses = curve(train(engine, own_share(3))).losses
        return str(engine.device), dist.get_backend_config(), os.environ["LOCAL_RANK"], losses[-1] < losses[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_rank_trains_on_its_device(backend):
    assert run_ranks(1, on_one_device, backend) == [("cuda:0", "cpu:gloo,cuda:nccl", "0", True)]


def sharing(backend):
    dist.init_process_group("gloo")
    with prepare(config(backend, "no_shard")) as engine:
        train(engine, own_share(3))
        return str(engine.device), dist.get_backend_config(), engine.weights.norms()


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_ranks_share_a_device_in_a_gloo_group_of_their_own(backend):
    first, second = run_ranks(2, sharing, backend, env={"CUDA_VISIBLE_DEVICES": "0"})
    assert first[:2] == second[:2] == ("cuda:0", "cpu:gloo,cuda:gloo")
    assert first[2] == second[2]


def test_copies_to_and_from_the_host_do_not_race():
    """Page-locked copies go on behind the host; whatever is read has arrived, and nothing is overwritten on its way."""
    torch.manual_seed(0)
    start, gradients = torch.randn(2**22), [torch.randn(2**22) for _ in range(4)]
    wanted, parameter = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.cuda())
    plain = torch.optim.AdamW([wanted], lr=0.01)
    optimizer = torch.optim.AdamW([parameter], lr=0.01)
    on_host = HostCopies(optimizer, {}, parameter.device, [[parameter]], pin_memory=True)
    for turn in range(50):
        wanted.grad = gradients[turn % 4]
        plain.step()
        parameter.grad = gradients[turn % 4].cuda(non_blocking=True)
        on_host.step()
    assert torch.equal(parameter.detach().cpu(), wanted.detach())
