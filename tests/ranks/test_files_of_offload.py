"""`offload` with `nvme`: the same training bit for bit, in files that are there while a run is and leave nothing."""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from harness import ADAMW, BACKENDS, EACH, OTHER, configured, in_ranks, my_rank, of_all_ranks, play, refused, values
from torch import nn

import unishard
from unishard.nvme import file_space
from unishard.nvme.rank_file import RankFile
from unishard.testing.models import MlpOutput, mlp

STATE = {"params": "none", "optimizer": "nvme"}
BOTH = {"params": "nvme", "optimizer": "nvme"}
IN_MEMORY = {"none": "none", "nvme": "cpu"}
WIDTH = 61
"""Odd, so that shards have other sizes than pieces."""


class Wide(nn.Module):
    """Enough elements for several pieces; its second branch is used only when told to."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH * 3) for _ in range(2))
        self.branch, self.head = nn.Linear(WIDTH * 3, WIDTH), nn.Linear(WIDTH * 3, 5)

    def forward(self, x, both=True):
        hidden = torch.tanh(sum(layer(x) for layer in self.layers))
        logits = self.head(hidden)
        if both:
            logits = logits + self.branch(hidden)[:, :5]
        return MlpOutput(logits.square().mean(), logits)


def batch(number):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * number + my_rank()))


def updated(engine, number, both=True):
    """One window: its loss and its norm."""
    for turn in range(2):
        loss = engine(batch(number * 2 + turn), both=both).loss
        engine.backward(loss)
        step = engine.step()
    return float(loss.detach()).hex(), float(step.grad_norm).hex()


def cfg_of(backend, offload, strategy="full_shard", precision="fp32", **sections):
    path = sections.pop("directory")
    directory = {"nvme_path": path} if "nvme" in offload.values() else {}
    sections.setdefault("optimizer", {**ADAMW, "weight_decay": 0.1, "amsgrad": True})
    return configured(backend, strategy, precision, offload=offload | directory, **sections)


@contextmanager
def one_directory():
    """The same on all ranks, on a disk, with pieces that are smaller than a shard."""
    directory = Path("/var/tmp") / f"unishard-{os.environ['MASTER_PORT']}"
    with mock.patch.object(file_space, "PIECE", 4096):
        yield str(directory)
    of_all_ranks(None)
    shutil.rmtree(directory, ignore_errors=True)


def in_file(tensor, directory):
    """Whether a tensor lies in memory that is mapped on a file of a directory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if directory in line:
            start, stop = (int(each, 16) for each in line.split()[0].split("-"))
            if start <= tensor.data_ptr() < stop:
                return True
    return False


def weights(engine):
    return {name: value.clone() for name, value in engine.weights.state_dict(all_ranks=True).items()}


def same(some, others):
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


PLACES = (
    ("full_shard", STATE, "fp32"),
    ("full_shard", BOTH, "bf16"),
    ("shard_grad_op", STATE, "bf16"),
    ("full_shard", {"params": "nvme", "optimizer": "none"}, "fp32"),
)
CELLS = tuple((backend, place) for backend in BACKENDS for place in range(len(PLACES)))
USES = (True, False, True, True)


@in_ranks(cells=CELLS)
def test_no_bit_of_a_training_is_another_one(backend, place):
    strategy, offload, precision = PLACES[place]
    found = []
    with one_directory() as directory:
        for places in (offload, {what: IN_MEMORY[where] for what, where in offload.items()}):
            cfg = cfg_of(backend, places, strategy, precision, directory=directory)
            with unishard.prepare(Wide(), cfg) as engine:
                curve = [updated(engine, *each) for each in enumerate(USES)]
                found.append((curve, weights(engine)))
                if places is offload:
                    looks_at_the_files(engine, directory, offload)
    assert found[0][0] == found[1][0]
    assert same(found[0][1], found[1][1])


def looks_at_the_files(engine, directory, offload):
    state = [
        value
        for parameter in engine.module.parameters()
        for value in engine._adapter.updates.optimizer_state.shards(parameter).values()
        if value.shape
    ]
    assert state
    assert {in_file(each.values, directory) for each in state if each.values.numel()} == {
        offload["optimizer"] == "nvme"
    }
    stepped = [each for each in engine._adapter.updates.stepped() if each.numel()]
    assert [in_file(each, directory) for each in stepped] == [offload["params"] == "nvme"] * len(stepped)
    assert not os.listdir(directory)  # a kill -9 would leave nothing there


@in_ranks(cells=EACH)
def test_a_checkpoint_does_not_know_of_files(backend):
    with one_directory() as directory:
        root = Path(directory) / "saved"
        with unishard.prepare(Wide(), cfg_of(backend, BOTH, directory=directory)) as engine:
            updated(engine, 0)
            updated(engine, 1, both=False)
            engine.save(root)
        found = []
        for other in (backend, OTHER[backend]):
            for places in (BOTH, {"params": "cpu", "optimizer": "cpu"}):
                with unishard.prepare(Wide(), cfg_of(other, places, directory=directory)) as engine:
                    engine.load(root)
                    found.append(([updated(engine, number) for number in (2, 3)], weights(engine)))
    for first, second in (found[:2], found[2:]):
        assert first[0] == second[0]
        assert same(first[1], second[1])


@in_ranks(cells=EACH)
def test_an_update_reads_and_writes_each_piece_once(backend):
    moved = []

    def noted(act):
        def call(file, start, memory):
            moved.append((act.__name__, start))
            act(file, start, memory)

        return call

    with (
        one_directory() as directory,
        mock.patch.object(RankFile, "read", noted(RankFile.read)),
        mock.patch.object(RankFile, "write", noted(RankFile.write)),
        unishard.prepare(Wide(), cfg_of(backend, STATE, directory=directory)) as engine,
    ):
        updated(engine, 0)
        moved.clear()
        updated(engine, 1)
    assert len(moved) == len(set(moved)) > 4 * 2 * 3  # pieces, both ways, of three keys


EIGHT_BITS = (
    ("fsdp", "full_shard", BOTH, "fp32"),
    ("fsdp", "shard_grad_op", STATE, "bf16"),
    ("deepspeed", "full_shard", BOTH, "bf16"),
    ("deepspeed", "shard_grad_op", STATE, "fp32"),
)


@in_ranks(cells=tuple((number,) for number in range(len(EIGHT_BITS))))
def test_of_a_state_of_8_bits_no_bit_is_another_one_either(cell):
    backend, strategy, offload, precision = EIGHT_BITS[cell]
    found = []
    with one_directory() as directory:
        both = (offload, {what: IN_MEMORY[where] for what, where in offload.items()})
        cfgs = [
            cfg_of(backend, each, strategy, precision, directory=directory, optimizer="adamw_8bit") for each in both
        ]
        for cfg, resumed in ((cfgs[0], None), (cfgs[1], None), (cfgs[0], 1), (cfgs[1], 0)):
            with unishard.prepare(Wide(), cfg) as engine:
                if resumed is None:
                    curve = [updated(engine, *each) for each in enumerate(USES)]
                    engine.save(f"{directory}/saved-{len(found)}")
                else:  # what ran without files goes on with them, and the other way round
                    engine.load(f"{directory}/saved-{resumed}")
                    curve = []
                more = [updated(engine, number) for number in (5, 6)]
                found.append((curve, more, weights(engine)))
                codes = [
                    each
                    for moments in engine._adapter.updates.torch_optimizer.moments.values()
                    for each in moments.codes.values()
                ]
                assert codes
                assert {in_file(each, directory) for each in codes} == {cfg is cfgs[0]}
    assert found[0][0] == found[1][0]
    for other in found[1:]:
        assert found[0][1] == other[1]
        assert same(found[0][2], other[2])


@in_ranks(cells=EACH)
def test_what_is_closed_leaves_no_thread_and_no_descriptor(backend):
    with one_directory() as directory:
        with unishard.prepare(Wide(), cfg_of(backend, BOTH, directory=directory)) as engine:
            updated(engine, 0)
            assert "unishard-nvme-read_0" in {each.name for each in threading.enumerate()}
        assert not [each.name for each in threading.enumerate() if "nvme" in each.name]
        assert not [
            each for each in os.listdir("/proc/self/fd") if directory in os.path.realpath(f"/proc/self/fd/{each}")
        ]


@in_ranks(cells=EACH)
def test_hooks_and_schedulers_of_the_script_see_one_step(backend):
    seen, kept = [], []

    def build(params):
        kept.append(torch.optim.AdamW(params, lr=1e-2))
        kept[0].register_step_post_hook(lambda *_: seen.append(None))
        return kept[0]

    with one_directory() as directory:
        cfg = cfg_of(backend, BOTH, directory=directory, optimizer=None)
        halves = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)  # noqa: E731
        with unishard.prepare(Wide(), cfg, optimizer=build, scheduler=halves) as engine:
            for number in range(3):
                updated(engine, number)
            assert (len(seen), engine.lr) == (3, 1e-2 / 8)


# -- what goes wrong -------------------------------------------------------------------------------


def in_memory(backend):
    return refused(unishard.prepare, mlp(), cfg_of(backend, STATE, directory="/dev/shm"))


def without_room(backend):
    with mock.patch("os.posix_fallocate", side_effect=OSError(errno.ENOSPC, "No space left on device")):
        return refused(unishard.prepare, mlp(), cfg_of(backend, BOTH, directory="."))


def not_a_directory(backend):
    return refused(unishard.prepare, mlp(), cfg_of(backend, STATE, directory="/proc/nothing"))


def of_whole_tensors(backend):
    class Normalized(torch.optim.SGD):
        """Looks at whole tensors."""

        def step(self, closure=None):
            for group in self.param_groups:
                for each in group["params"]:
                    if each.grad is not None:
                        each.grad.div_(each.grad.norm())
            return super().step(closure)

    cfg = cfg_of(backend, STATE, directory=".", optimizer=None)
    return refused(unishard.prepare, mlp(), cfg, optimizer=lambda params: Normalized(params, lr=0.1))


REFUSED = {
    in_memory: "/dev/shm is a tmpfs, whose files lie in memory; name a directory on a disk",
    not_a_directory: "/proc/nothing cannot be used: No such file or directory; name a directory on a disk",
    of_whole_tensors: "nvme needs an optimizer that updates each element from its own state, not Normalized; choose cpu",
    without_room: ".* has no room: this rank needs 0.00 GiB there, the 2 ranks of the node 0.00 GiB, and .* GiB were "
    "free (No space left on device); free some, or name another directory",
}
CASES = tuple((scenario, (backend,)) for scenario in REFUSED for backend in BACKENDS)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scenario", REFUSED, ids=lambda scenario: scenario.__name__)
def test_what_cannot_be_had_is_one_error(scenario, backend):
    for said in values(play(CASES)[scenario, (backend,)]):
        assert said.startswith("ConfigError: offload.")
        assert re.search(re.escape(REFUSED[scenario]).replace(r"\.\*", ".*"), said)


@in_ranks(world=1, cells=EACH)
def test_a_disk_that_fails_is_named(backend):
    with one_directory() as directory, unishard.prepare(Wide(), cfg_of(backend, STATE, directory=directory)) as engine:
        updated(engine, 0)
        with mock.patch("os.preadv", side_effect=OSError(errno.EIO, "Input/output error")):
            said = refused(updated, engine, 1)
    assert f"the file of rank 0 in {directory} cannot be read: Input/output error" in said
