"""`unishard.integrations.ray` under Ray Train: a worker is lost, and fewer workers go on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import launched_training
import pytest
import ray_training
import torch
from harness import in_turn

import unishard
from unishard.integrations import ray as reporting
from unishard.testing import run_ranks

pytestmark = pytest.mark.ranks
with_ray = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")

CONFIG = {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}, "sharding": "full_shard"}


def train_on_ray(tmp_path, backend, workers, failures):
    words = [
        ray_training.__file__, str(tmp_path / "losses"), str(tmp_path / "storage"), str(workers), str(failures),
        json.dumps(CONFIG | {"backend": backend}),
    ]  # fmt: skip
    told = {"CUDA_VISIBLE_DEVICES": "", "RAY_USAGE_STATS_ENABLED": "0", "HOME": str(tmp_path)}
    path = os.pathsep.join([str(Path(ray_training.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path, env=os.environ | told | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def logged(tmp_path):
    return [json.loads(line) for line in (tmp_path / "losses").read_text().splitlines()]


def without_ray(backend) -> dict[int, float]:
    return launched_training.train(launched_training.config(CONFIG | {"backend": backend}))


@with_ray
@in_turn
def test_a_lost_worker_and_fewer_workers_leave_the_losses_as_they_are(backend, tmp_path):
    failed = train_on_ray(tmp_path, backend, 2, failures=1)  # a worker is lost at 5, and another one at 7
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert "failed: " in failed.stderr
    done = train_on_ray(tmp_path, backend, 1, failures=0)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(world, step) for world, step, _ in logged(tmp_path)] == [
        *((2, step) for step in (1, 2, 3, 4, 5, 5, 6, 7)), *((1, step) for step in (7, 8))
    ]  # fmt: skip
    expected = run_ranks(2, without_ray, backend)[0]
    assert all(loss == pytest.approx(expected[step], rel=1e-6) for _, step, loss in logged(tmp_path))
    kept = {path.name for path in (tmp_path / "storage" / "run" / "checkpoints").glob("step-*")}
    assert "step-00000008" in kept


@with_ray
@pytest.mark.parametrize("call", ["report", "resume"])
def test_outside_of_a_worker_it_is_one_error(call):
    with pytest.raises(unishard.ContractError, match="is no worker of Ray Train"):
        getattr(reporting, call)(None, *([{}] if call == "report" else []))


def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(unishard.BackendError, match=r"pip install 'unishard\[ray\]'"):
        reporting.resume(None)


class Reported:
    """Ray Train, as far as `report` without a checkpoint uses it."""

    def __init__(self):
        self.metrics = []

    def report(self, metrics):
        self.metrics.append(metrics)


def reporting_with_keep_last():
    cfg = unishard.Config.model_validate({"checkpoint": {"keep_last": 2}, "training": {"micro_batch_size": 1}})
    train = Reported()
    reporting._train = lambda: train
    with unishard.prepare(torch.nn.Linear(2, 1), cfg) as engine:
        reporting.report(engine, {"loss": 1.0}, save=False)
        try:
            reporting.report(engine, {"loss": 1.0})
        except unishard.ConfigError as error:
            return train.metrics, str(error)
    return train.metrics, ""


def test_keep_last_is_refused():
    metrics, error = run_ranks(1, reporting_with_keep_last)[0]
    assert metrics == [{"loss": 1.0}]
    assert "checkpoint.keep_last: would delete checkpoints that Ray counts on; remove it, and set Check" in error


def test_a_storage_that_is_no_folder_is_refused():
    class Storage:
        experiment_fs_path = "bucket/run"
        storage_filesystem = type("FileSystem", (), {"type_name": "s3"})

    class Train:
        @staticmethod
        def get_context():
            return type("Context", (), {"get_storage": staticmethod(Storage)})

    with pytest.raises(unishard.CheckpointError, match="bucket/run: is on s3, and ranks write a checkpoint into one"):
        reporting._root(Train)
