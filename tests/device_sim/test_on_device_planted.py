"""Waits of unishard and of both engines that are removed on purpose: each is noticed by the order alone, in every
run."""

from __future__ import annotations

import os
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from cells import OFFLOADS, WINDOWS
from harness import config, own_share, prepare, train
from planting import noticed, without

from unishard.checkpoint.background import Background
from unishard.contract.units import Unit
from unishard.data import batches
from unishard.distributed.host_read import HostRead
from unishard.engine.model.activation_offload import units as activation_offload
from unishard.testing import run_ranks
from unishard_fsdp.cases.host_copies import HostCopies

DEVICE = torch.device("cuda", 0)
TIMES = int(os.environ.get("DEVICE_SIM_TIMES", "1"))
"""How often each is played: 100 shows that it is noticed in every run."""


class Planted(NamedTuple):
    """One wait that is removed."""

    what: str
    run: tuple[str, ...]
    """Of a run on two ranks: backend, strategy, offload. Of a piece: its name."""
    wait: str
    file: str
    functions: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.what


# ---------------------------------------------------------------- in one process


def host_read() -> None:
    HostRead(torch.ones(3, device=DEVICE).sum()).get()


def host_optimizer() -> None:
    parameters = [torch.nn.Parameter(torch.ones(8, device=DEVICE)) for _ in range(2)]
    units = [[parameter] for parameter in parameters]
    copies = HostCopies(torch.optim.SGD(parameters, lr=0.5), {}, DEVICE, units, pin_memory=True)
    for _ in range(2):
        sum(parameter.square().sum() for parameter in parameters).backward()
        copies.step()
        copies.gradients.forget()
        for parameter in parameters:
            parameter.grad = None


class Stretch(NamedTuple):
    """As of a snapshot."""

    read: Any
    start: int
    end: int


class Snapshot(NamedTuple):
    """As a save stages."""

    shards: dict[str, Stretch]


def background_save() -> None:
    weights = torch.ones(8, device=DEVICE)
    staged = Background().stage(Snapshot({"w": Stretch(lambda start, end: weights[start:end], 0, 8)}))  # type: ignore[arg-type]
    staged.shards["w"].read(0, 8).clone()


def offloaded_activations() -> None:
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(4)]
    model = torch.nn.Sequential(*blocks).to(DEVICE)
    found = [Unit(str(number), block) for number, block in enumerate(blocks)]
    activation_offload.apply(found, DEVICE, pin_memory=True)
    data = torch.randn(512, 64, device=DEVICE, requires_grad=True)
    for _ in range(2):
        model(data).square().sum().backward()


PIECES = {
    "host-read": host_read,
    "host-optimizer": host_optimizer,
    "background-save": background_save,
    "offloaded-activations": offloaded_activations,
}
IN_PIECES = (
    Planted("the host reads a norm", ("host-read",), "Event.synchronize", "distributed/host_read.py"),
    Planted(
        "the host steps an offloaded optimizer",
        ("host-optimizer",),
        "Event.synchronize",
        "unishard_fsdp/cases/host_copies.py",
    ),
    Planted("a background save reads its copy", ("background-save",), "cuda.synchronize", "checkpoint/background.py"),
)


@pytest.mark.parametrize("piece", PIECES)
def test_a_piece_has_no_race(piece):
    assert noticed(PIECES[piece]) == ""


@pytest.mark.parametrize("planted", IN_PIECES, ids=str)
def test_a_wait_that_a_piece_lacks_is_noticed(planted):
    for _ in range(TIMES):
        with without(planted.wait, planted.file, *planted.functions) as skipped:
            said = noticed(PIECES[planted.run[0]])
        assert skipped
        assert "pinned memory without a wait" in said


OF_ACTIVATIONS = (
    Planted("a block computes, then its activations leave", (), "Stream.wait_stream", "", ("_behind_current",)),
    Planted("activations leave, then their memory is used again", (), "Stream.wait_event", "", ("_let_go",)),
    Planted("activations arrive, then a block computes", (), "Stream.wait_event", "", ("view", "arrive")),
)


@pytest.mark.parametrize("planted", OF_ACTIVATIONS, ids=str)
def test_a_wait_that_activations_lack_is_noticed(planted):
    for _ in range(TIMES):
        with without(planted.wait, "activation_offload/store.py", *planted.functions) as skipped:
            said = noticed(offloaded_activations)
        assert skipped
        assert "without a wait for" in said or "it needs record_stream, or a wait" in said


OF_HOST_COPIES = (
    Planted("weights and gradients are computed, then go down", (), "Stream.wait_stream", "", ("_read",)),
    Planted("weights go up, then are read", (), "Stream.wait_stream", "", ("_write",)),
)


@pytest.mark.parametrize("planted", OF_HOST_COPIES, ids=str)
def test_a_wait_that_host_copies_lack_is_noticed(planted):
    for _ in range(TIMES):
        with without(planted.wait, "unishard_fsdp/cases/host_copies.py", *planted.functions) as skipped:
            said = noticed(host_optimizer)
        assert skipped
        assert "without a wait for" in said


def test_a_pinned_buffer_that_is_used_again_is_noticed(monkeypatch):
    kept = torch.empty(8, pin_memory=True)

    def scenario():
        for turn in range(2):
            batches.to_device(torch.full((8,), float(turn)), DEVICE)

    assert noticed(scenario) == ""
    monkeypatch.setattr(batches, "_pinned", kept.copy_)
    assert "aten::copy_ on the host" in noticed(scenario)


# ---------------------------------------------------------------- in an engine, on two ranks

FSDP, GROUP = "_fully_shard/_fsdp", "_fully_shard/_fsdp_param_group.py"
SHARDED, ZERO_3, ZERO_2 = (
    ("fsdp", "full_shard", ""),
    ("deepspeed", "full_shard", ""),
    ("deepspeed", "shard_grad_op", ""),
)
IN_ENGINES = (
    Planted(
        "FSDP2 copies in, then gathers",
        SHARDED,
        "Stream.wait_stream",
        f"{FSDP}_collectives.py",
        ("foreach_all_gather",),
    ),
    Planted("FSDP2 gathers, then copies out", SHARDED, "Stream.wait_event", f"{FSDP}_collectives.py"),
    Planted(
        "FSDP2 copies out, then gathers the next",
        SHARDED,
        "Stream.wait_event",
        GROUP,
        ("_wait_all_gather_streams_on_event",),
    ),
    Planted(
        "FSDP2 computes gradients, then reduces",
        SHARDED,
        "Stream.wait_stream",
        f"{FSDP}_collectives.py",
        ("foreach_reduce",),
    ),
    Planted(
        "FSDP2 reduces, then steps",
        SHARDED,
        "Stream.wait_event",
        GROUP,
        ("_wait_for_post_backward", "finalize_backward"),
    ),
    Planted("FSDP2 copies gradients to the host", ("fsdp", "full_shard", "all"), "Event.synchronize", GROUP),
    Planted("ZeRO-3 updates, then gathers", ZERO_3, "Stream.wait_stream", "private/partitioned.py", ("gather_after",)),
    Planted("ZeRO-3 gathers, then computes", ZERO_3, "Stream.wait_stream", "partitioned_param_coordinator.py"),
    Planted("ZeRO-3 computes gradients, then reduces", ZERO_3, "Stream.wait_stream", "zero/stage3.py"),
    Planted("ZeRO-2 computes gradients, then reduces", ZERO_2, "Stream.wait_stream", "zero/stage_1_and_2.py"),
)


def run(backend: str, strategy: str, offload: str) -> None:
    """Three updates."""
    with prepare(config(backend, strategy, training=WINDOWS, **OFFLOADS[offload])) as engine:
        train(engine, own_share(6))


def on_a_rank() -> dict[Planted, list[tuple[bool, str]]]:
    """Whether each wait was skipped, and what was noticed, each time."""
    found: dict[Planted, list[tuple[bool, str]]] = {planted: [] for planted in IN_ENGINES}
    for planted in IN_ENGINES * TIMES:
        with without(planted.wait, planted.file, *planted.functions) as skipped:
            said = noticed(run, *planted.run)
        found[planted].append((bool(skipped), said))
    return found


@cache
def played() -> list[dict[Planted, list[tuple[bool, str]]]]:
    return run_ranks(2, on_a_rank, timeout=600 * TIMES)


@pytest.mark.parametrize("planted", IN_ENGINES, ids=str)
def test_a_wait_that_an_engine_lacks_is_noticed(planted):
    for rank in played():
        for skipped, said in rank[planted]:
            assert skipped, "this version of the engine has no such wait"
            assert "without a wait for" in said or "it needs record_stream, or a wait" in said
