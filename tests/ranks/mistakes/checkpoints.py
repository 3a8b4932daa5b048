"""Checkpoints that are saved, loaded or exported where others are already."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from harness import checked as config
from harness import my_rank, own_share, prepare, train

from mistakes.mistake import elsewhere, mistake
from unishard.checkpoint import finding, manifest


@contextmanager
def folder() -> Iterator[Path]:
    """A folder that all ranks share, removed afterwards. Needs a process group."""
    made = [tempfile.mkdtemp(prefix="mistake-") if my_rank() == 0 else ""]
    dist.broadcast_object_list(made)
    try:
        yield Path(made[0])
    finally:
        dist.barrier()
        if my_rank() == 0:
            shutil.rmtree(made[0])


def steps(root):
    """The steps of the checkpoints there."""
    return [found.step for found in finding.checkpoints(root)]


@mistake("a second run with the `checkpoint.dir` of an earlier one, and no `engine.load`")
def rerun(backend):
    with prepare(config(backend)), folder() as root:
        cfg = config(backend, checkpoint={"dir": str(root), "every_steps": 2, "keep_last": 2})
        with prepare(cfg) as engine:
            train(engine, own_share(4))
        with prepare(cfg) as engine:
            train(engine, own_share(1))


@mistake("resuming from an earlier checkpoint, and later from `latest`")
def gone_back(backend):
    with prepare(config(backend)), folder() as root:
        with prepare(config(backend, checkpoint={"dir": str(root), "every_steps": 1})) as engine:
            train(engine, own_share(5))
        clock_ahead(root)
        with prepare(config(backend, checkpoint={"dir": str(root)})) as engine:
            engine.load(root / "step-00000002")
            train(engine, own_share(1))
            engine.save()
        with prepare(config(backend, checkpoint={"dir": str(root)})) as engine:
            return engine.load("latest").step, 3


def clock_ahead(root: Path) -> None:
    """As if the clock of the machine that wrote the checkpoints were a year ahead."""
    if my_rank() == 0:
        for found in finding.checkpoints(root):
            facts = json.loads((found.path / manifest.FILE).read_text())
            facts["written"] = facts["written"].replace("20", "21", 1)
            del facts["crc32"]
            (found.path / manifest.FILE).write_text(json.dumps(facts))
    dist.barrier()


@mistake("a relative `checkpoint.dir`, and `os.chdir` during the run")
def moved_away(backend):
    before = Path.cwd()
    with prepare(config(backend)), folder() as root:
        (root / "elsewhere").mkdir(exist_ok=True)
        os.chdir(root)
        try:
            with prepare(config(backend, checkpoint={"dir": "run", "every_steps": 1})) as engine:
                train(engine, own_share(1))
                os.chdir(root / "elsewhere")
                train(engine, own_share(1))
        finally:
            os.chdir(before)
        return steps(root / "run"), [1, 2]


@mistake("`engine.export` into a folder that holds something")
def exported_twice(backend):
    with prepare(config(backend)) as engine, folder() as root:
        engine.export(root / "model")
        engine.export(root / "model")


@mistake("`engine.save(metric=loss.item())`, the loss of each rank's own samples")
def own_metric(backend):
    with prepare(config(backend)) as engine, folder() as root:
        engine.save(root, metric=0.5 + my_rank())


elsewhere(
    "`engine.weights.average(decay)` after `prepare` under `checkpoint.on_existing: resume`",
    "tests/ranks/test_ema.py::test_a_run_that_prepare_resumes_continues_its_average",
)
