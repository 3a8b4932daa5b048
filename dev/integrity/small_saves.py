"""Tiny checkpoints of known content, saved by 2 ranks as an engine saves."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import unishard
from unishard.checkpoint import direct_file, directory, finding, manifest, writing
from unishard.checkpoint.background import Background
from unishard.checkpoint.manifest import ModelRecord
from unishard.checkpoint.saving import Retention, Snapshot, save
from unishard.checkpoint.tensor_reader import Tensors
from unishard.checkpoint.verifying import damaged
from unishard.distributed import process_group
from unishard.distributed.lazy_shards import LazyShard
from unishard.distributed.on_ranks import on_first
from unishard.errors import CheckpointError
from unishard.failures import lifetime

WORLD = 2
RETENTION = Retention(keep_last=2, keep_every=20)
FORMER = {10: 1, 20: 2, 30: 3}
"""Steps that are saved before, and the content of each."""
FOUND_BEFORE = {finding.name_of(step): version for step, version in FORMER.items()}
"""The same by name."""
RUN, OTHER_RUN = "a" * 8, "b" * 8
"""The run that saves, and one that begins beside it."""
NEW, NEXT = 4, 5
"""Contents of the save that is cut off, and of the one after it."""
NEXT_STEP = 50


class Scenario(NamedTuple):
    """What is saved into what."""

    name: str
    step: int
    left: bool = False
    """Whether an earlier run was killed too, and left all that there can be."""
    background: bool = False
    beside: bool = False
    """Whether it is saved by a run that begins beside another one, which has saved before."""

    @property
    def saved_as(self) -> str:
        """The name of its checkpoint."""
        return finding.name_of(self.step, OTHER_RUN if self.beside else "")


SCENARIOS = (
    Scenario("a new step", 40),
    Scenario("a step again", 30),
    Scenario("after a kill", 40, left=True),
    Scenario("in the background", 40, background=True),
    Scenario("beside another run", 30, beside=True),
)


def contents(version: int) -> dict[str, torch.Tensor]:
    """Every tensor of one version; no element of it is that of another version."""
    weight = torch.arange(96.0).reshape(24, 4) + 1000 * version
    return {
        "model.weight": weight,
        "model.bias": torch.full((5,), float(version)),
        "optim.state.weight.exp_avg": -weight,
        "optim.state.weight.step": torch.tensor(float(version)),
        "rng.rank00000.cpu": torch.full((8,), version, dtype=torch.uint8),
        "rng.rank00001.cpu": torch.full((8,), version + 100, dtype=torch.uint8),
    }


def snapshot(step: int, version: int, rank: int, beside: bool = False) -> Snapshot:
    """What a rank holds: a half of each divided tensor, all of the small ones, random numbers of its own."""
    divided = {"model.weight": 96, "optim.state.weight.exp_avg": 96}
    stretches = {}
    for name, values in contents(version).items():
        if name.startswith("rng") and f"{rank:05d}" not in name:
            continue
        flat, half = values.reshape(-1), divided.get(name, 0) // WORLD
        begin, end = (rank * half, (rank + 1) * half) if half else (0, flat.numel())
        stretches[name] = LazyShard(
            values.shape, values.dtype, begin, end, lambda first, last, flat=flat: flat[first:last]
        )
    facts = {
        "versions": {"unishard": "0"},
        "world_size": WORLD,
        "model": ModelRecord(class_name="Tiny", fingerprint="0" * 16, numel=101),
        "buffers": [],
        "state": {"version": version},
    }
    assets = {"assets/config.json": f'{{"version": {version}}}'.encode()}
    return Snapshot(step, stretches, {"tied": "weight"}, facts, assets, OTHER_RUN if beside else RUN, beside)


def content_of(folder: Path) -> int:
    """The version that a checkpoint holds, all of it.

    Raises:
        CheckpointError: It is damaged, or of several versions.
    """
    facts = manifest.read(folder)
    problems = damaged(folder, facts)
    version = facts.state["version"]
    tensors, expected = Tensors(folder), contents(version)
    expected["model.tied"] = expected["model.weight"]
    if set(tensors) != set(expected):
        problems.append(f"{folder}: holds {sorted(tensors)}")
    problems += [
        f"{folder}: {name} is not of version {version}"
        for name in expected
        if not torch.equal(tensors.full(name), expected[name])
    ]
    if f'"version": {version}}}' not in (folder / "assets/config.json").read_text():
        problems.append(f"{folder}: the asset is not of version {version}")
    if finding.name_of(facts.step) not in folder.name:
        problems.append(f"{folder}: is of step {facts.step}")
    if problems:
        raise CheckpointError("; ".join(problems))
    return int(version)


def start() -> tuple[dist.ProcessGroup, int]:
    writing.CHUNK = 128  # several records of each divided tensor
    direct_file.BUFFER = 4096  # several writes of each file
    lifetime.ensure(unishard.Topology.from_environment())
    return process_group.host_group(), dist.get_rank()


def save_as_an_engine(root: Path, scenario: Scenario, version: int, group: dist.ProcessGroup) -> None:
    """As an engine does it, the first time in a run."""
    taken = snapshot(scenario.step, version, dist.get_rank(), scenario.beside)
    background, ended = Background(ready=scenario.background), threading.Event()
    on_first(group, lambda: directory.clean(root))
    if not scenario.background:
        save(root, taken, RETENTION, group)
        return
    copy = background.stage(taken)

    def work(own: dist.ProcessGroup) -> None:
        try:
            save(root, copy, RETENTION, own)
        finally:
            ended.set()

    background.start(work)
    training = torch.ones(64, 64)
    while not ended.is_set():
        training = training @ training / 64
    background.wait()


def prepare(roots: Mapping[Scenario, str]) -> None:
    """Make the directories that the saves of the scenarios find. Collective."""
    group, rank = start()
    for scenario, root in roots.items():
        for step, version in FORMER.items():
            save(Path(root), snapshot(step, version, rank), Retention(), group)
        if rank == 0 and scenario.left:
            _leave(Path(root))
    dist.barrier(group)


def _leave(root: Path) -> None:
    """What killed runs leave: a checkpoint half written, one half deleted, one that was about to be replaced, a
    draft."""
    last, tag = root / finding.name_of(30), "0" * 32
    shutil.copytree(last, root / f".tmp-step-00000040-{tag}", ignore=shutil.ignore_patterns("manifest.json"))
    shutil.copytree(last, root / f".trash-step-00000005-{tag}", ignore=shutil.ignore_patterns("__1_0.distcp"))
    last.rename(root / f".old-step-00000030-{tag}")
    (root / f".latest-{tag}").write_text("step-000")
