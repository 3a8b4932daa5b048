"""The line that names SyncBatchNorm: on several ranks, for modules that train, with what holds on the device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from unishard import Topology
from unishard.engine.model.batch_norm import name_synchronized


def lines(caplog, model, device="cpu", **topology):
    name_synchronized(model, Topology(**{"world_size": 2, "rank": 0} | topology), torch.device(device))
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("device", "advice"),
    [
        ("cuda", "to normalize over all ranks, pass torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) to prepare"),
        ("cpu", "needs a GPU; on the CPU use GroupNorm, or a larger micro-batch"),
    ],
)
def test_the_advice_is_for_the_device(caplog, device, advice):
    (line,) = lines(caplog, nn.Sequential(*(nn.BatchNorm2d(2) for _ in range(3))), device)
    assert line.startswith("Sequential normalizes by each rank's own micro-batch in 3 BatchNorm modules (0, 1, ...); ")
    assert line.endswith(advice)


@pytest.mark.parametrize(
    ("model", "topology"),
    [
        (nn.Sequential(nn.BatchNorm1d(2)), {"world_size": 1}),
        (nn.Sequential(nn.BatchNorm1d(2)), {"rank": 1}),
        (nn.Sequential(nn.BatchNorm1d(2)).eval(), {}),
        (nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(2))), {}),
        (nn.Sequential(nn.LayerNorm(2)), {}),
    ],
    ids=["one rank", "another rank", "in evaluation mode", "converted", "no BatchNorm"],
)
def test_nothing_is_said_where_nothing_is_to_say(caplog, model, topology):
    assert lines(caplog, model, **topology) == []
