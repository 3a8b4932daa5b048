"""`unishard launch --ray` on a local Ray of 2 workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import launched_training
import pytest

from unishard.testing import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")]

CONFIG = {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}, "sharding": "full_shard"}


def launch_on_ray(tmp_path, max_restarts, *arguments):
    """`unishard launch --ray` of the training with 2 workers."""
    (tmp_path / "c.yaml").write_text(
        json.dumps(CONFIG | {"launch": {"processes_per_node": 2, "max_restarts": max_restarts}})
    )
    words = [
        "-m",
        "unishard",
        "launch",
        "c.yaml",
        "--ray",
        launched_training.__file__,
        str(tmp_path / "losses"),
        *arguments,
    ]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": "", "RAY_USAGE_STATS_ENABLED": "0", "HOME": str(tmp_path)}
    return subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300
    )


def test_two_workers_of_ray_train_as_two_ranks(tmp_path):
    done = launch_on_ray(tmp_path, 1)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "losses").read_text().splitlines()]
    expected = run_ranks(2, whole_run)[0]
    assert {step: (world, loss) for _, world, step, loss in lines} == {
        step: (2, loss) for step, loss in expected.items()
    }


def test_a_worker_of_ray_that_fails_ends_the_run_and_is_named(tmp_path):
    done = launch_on_ray(tmp_path, 0, "--end", "1:2:raise")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "unishard launch: " in done.stderr
    assert "a broken sample" in done.stderr


def whole_run() -> dict[int, float]:
    return launched_training.train(launched_training.config(CONFIG))
