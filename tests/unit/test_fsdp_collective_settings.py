"""Settings of FSDP2's collectives reach every unit, and are refused where torch or the device lacks them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from unishard.config import Config
from unishard.config.topology import Topology
from unishard.errors import BackendError
from unishard_fsdp import backend
from unishard_fsdp.options import COLLECTIVE_SETTINGS, FullyShard, parse
from unishard_fsdp.sharding import collective_settings

ALL = set(COLLECTIVE_SETTINGS)


def options(*settings: str) -> FullyShard:
    cfg = Config.model_validate({"native": {"fsdp": dict.fromkeys(settings, True)}})
    parsed = parse(backend.translate(cfg, Topology(2, 2)).native)
    assert isinstance(parsed, FullyShard)
    return parsed


class Sharded(nn.Linear):
    """Stands for a module on which `fully_shard` was called."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__(1, 1)
        for name in ALL:
            setattr(self, f"set_{name}", lambda *args, name=name: calls.append(name))


@pytest.mark.parametrize(
    "on", [(), ("symm_mem_for_comm", "separate_reduce_scatter_group"), ("allocate_memory_from_process_group_for_comm",)]
)
def test_each_unit_and_the_root_get_what_is_on(on: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(collective_settings, "FSDPModule", Sharded)
    root = Sharded(calls)
    root.inner = nn.Sequential(Sharded(calls), nn.Linear(1, 1))
    collective_settings.apply(root, options(*on))
    assert calls == [name for name in ("separate_reduce_scatter_group",) if name in on] + [
        name for name in on if name != "separate_reduce_scatter_group" for _ in range(2)
    ]


@pytest.mark.parametrize("name", sorted(ALL))
def test_a_torch_without_the_method_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    collective_settings.require({name: True})
    monkeypatch.delattr(FSDPModule, f"set_{name}")
    collective_settings.require(dict.fromkeys(ALL - {name}, True))
    with pytest.raises(
        BackendError,
        match=rf"native\.fsdp\.{name} needs FSDPModule\.set_{name}, .*; remove it, or install torch 2\.13 or newer",
    ):
        collective_settings.require({name: True})


def test_what_only_nccl_has_is_refused_elsewhere() -> None:
    asked: dict[str, Any] = dict.fromkeys(ALL, True)
    collective_settings.require_device(asked, torch.device("cuda"))
    collective_settings.require_device({"separate_reduce_scatter_group": True}, torch.device("cpu"))
    for name in ALL - {"separate_reduce_scatter_group"}:
        with pytest.raises(
            BackendError, match=rf"native\.fsdp\.{name} needs CUDA devices, and this run computes on cpu: .*; remove it"
        ):
            collective_settings.require_device({name: True}, torch.device("cpu"))
