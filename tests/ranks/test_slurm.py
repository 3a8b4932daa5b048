"""The batch script of `unishard launch --slurm` on a Slurm cluster."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from pathlib import Path

import launched_training
import pytest
import slurm_cluster

from unishard.cli import app
from unishard.testing import run_ranks

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(bool(slurm_cluster.unavailable()), reason=slurm_cluster.unavailable()),
]

CONFIG = {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}, "sharding": "full_shard"}


def test_the_submitted_job_trains(tmp_path, monkeypatch, capsys):
    with tempfile.TemporaryDirectory(prefix="slurm") as name, slurm_cluster.slurm_cluster(Path(name)) as environ:
        folder = tmp_path
        launch = {"processes_per_node": 2, "slurm": {"output": str(folder / "job.out"), "time": "0:10:00"}}
        (folder / "c.yaml").write_text(json.dumps(CONFIG | {"launch": launch}))
        for variable in ("PATH", "SLURM_CONF"):
            monkeypatch.setenv(variable, environ[variable])
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        monkeypatch.chdir(folder)
        app(
            ["launch", "c.yaml", "--slurm", launched_training.__file__, str(folder / "losses")],
            prog_name="unishard",
            standalone_mode=False,
        )
        job = capsys.readouterr().out.removeprefix("submitted job ").strip()
        state = wait(job, environ)
        said = (folder / "job.out").read_text()
        assert state == "COMPLETED", said
        assert "finished with seed 0" in said
        lines = [json.loads(line) for line in (folder / "losses").read_text().splitlines()]
    expected = run_ranks(2, launched_training.whole_run, CONFIG)[0]
    assert {step: (world, loss) for _, world, step, loss in lines} == {
        step: (2, loss) for step, loss in expected.items()
    }


def wait(job: str, environ: dict[str, str]) -> str:
    """The state in which a job ends."""
    end = time.monotonic() + 180
    while True:
        said = subprocess.run(
            ["scontrol", "show", "job", job], env=environ, capture_output=True, text=True, check=True
        ).stdout
        state = said.partition("JobState=")[2].split()[0]
        if state not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
            return state
        assert time.monotonic() < end, said
        time.sleep(0.5)
