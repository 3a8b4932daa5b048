"""`unishard launch` for real: what the user sees and gets when ranks end, are killed or interrupted, and elastic
restarts."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import launched_training
import pytest
from forking import in_a_fork
from harness import WARNING

from unishard.cli import app
from unishard.testing import run_ranks

pytestmark = pytest.mark.ranks

TRAINS = launched_training.__file__
SAYS = str(Path(TRAINS).with_name("launched_loading.py"))
CONFIG = {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}, "sharding": "full_shard"}


class Ended(NamedTuple):
    code: int
    stdout: str
    stderr: str


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOGLEVEL")} | {
        "CUDA_VISIBLE_DEVICES": ""
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "c.yaml").write_text(json.dumps(CONFIG))
    return tmp_path


def launch(folder: Path, *words: str, stop: tuple[int, str, str] | None = None) -> Ended:
    """`unishard launch` and its ranks in processes that have imported torch already.

    Args:
        folder: The current one.
        words: After the number of processes.
        stop: A signal to that process, once a file holds a text twice.
    """
    code = in_a_fork(launch_here, str(folder), words, stop)
    return Ended(code, (folder / "stdout").read_text(), (folder / "stderr").read_text())


def launch_here(folder: str, words: tuple[str, ...], stop: tuple[int, str, str] | None) -> int:
    os.chdir(folder)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
    if stop:
        threading.Thread(target=stop_after, args=stop, daemon=True).start()
    try:
        app(["launch", "c.yaml", "--processes-per-node", "2", *words], prog_name="unishard")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def stop_after(number: int, file: str, text: str) -> None:
    while not Path(file).exists() or Path(file).read_text().count(text) < 2:
        time.sleep(0.05)
    os.kill(os.getpid(), number)


def settings(*changes: str) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


def test_a_killed_rank_is_started_anew_and_the_losses_go_on(folder):
    saves = ("checkpoint.on_existing=resume", "checkpoint.every_steps=2", "checkpoint.dir=runs")
    ended = launch(
        folder, *settings(*saves, "training.seed=7", "launch.max_restarts=1"), TRAINS, "losses", "--end", "1:5:kill"
    )
    assert ended.code == 0, ended.stderr
    assert "unishard launch: starts all ranks anew (restart 1 of 1)" in ended.stderr
    assert "finished with seed 7" in ended.stderr
    lives = [json.loads(line) for line in (folder / "losses").read_text().splitlines()]
    assert [step for life, _, step, _ in lives if life == 0][:4] == [1, 2, 3, 4]
    assert [step for life, _, step, _ in lives if life == 1] == [5, 6, 7, 8]
    expected, _ = run_ranks(2, launched_training.whole_run, CONFIG, "training.seed=7")
    assert [(world, loss) for _, world, _, loss in lives] == [(2, expected[step]) for _, _, step, _ in lives]


def test_the_rank_that_fails_is_what_the_user_sees(folder):
    ended = launch(folder, TRAINS, "losses", "--end", "1:2:raise")
    assert ended.code == 1
    first, *_, last = (line for line in ended.stderr.splitlines() if not WARNING.fullmatch(line))
    assert re.fullmatch(
        r"unishard: rank 1 of 2 raised ValueError: a broken sample \(launched_training.py:\d+ in \w+\)", first
    ), ended.stderr
    assert ended.stderr.count("Traceback") == 1, ended.stderr
    assert not re.search(r"torch\.distributed\.elastic|ChildFailedError|\*\*\*\*", ended.stderr), ended.stderr
    # Rank 0 may end while rank 1 still releases its memory.
    named = (
        r"1 has ended with exit code 1|0 has ended with exit code 1 because rank 1 raised ValueError: a broken "
        r"sample .*"
    )
    assert re.fullmatch(f"unishard launch: rank ({named}); its own message is above", last), last


def test_the_exit_status_is_that_of_the_rank(folder):
    ended = launch(folder, SAYS, "exit", "1", "7")
    assert (ended.code, ended.stderr) == (
        7,
        "unishard launch: rank 1 has ended with exit code 7; its own message is above\n",
    )


def test_ctrl_c_ends_every_rank(folder):
    (folder / "waits.py").symlink_to(SAYS)
    ended = launch(folder, "-m", "waits", "wait", stop=(signal.SIGINT, "stdout", "seed 0"))
    assert ended.code == 128 + signal.SIGINT, ended.stderr
    assert "unishard launch: ended all ranks after SIGINT" in ended.stderr.splitlines()  # a rank may say more, later


def test_a_signal_lets_the_ranks_save_and_the_exit_status_says_so(folder):
    saves = settings("checkpoint.dir=runs", "checkpoint.on_signal=[USR1]")
    told = settings("launch.environment={TOKEN: a secret}")
    ended = launch(
        folder, *saves, *told, TRAINS, "losses", "--end=-1:0:slow", stop=(signal.SIGUSR1, "losses", "[0, 2, ")
    )
    assert ended.code == 85, ended.stderr
    steps = [json.loads(line)[2] for line in (folder / "losses").read_text().splitlines()]
    assert 2 <= steps[-1] < 8
    (saved,) = (folder / "runs").glob("step-*")
    assert int(saved.name.removeprefix("step-")) in (steps[-1], steps[-1] + 1)  # after the update in which it came
    assert "a secret" not in (saved / "manifest.json").read_text()


def test_the_printed_command_runs_in_a_shell(folder):
    printed = launch(folder, *settings("training.seed=5"), "--dry-run", SAYS).stdout
    done = subprocess.run(
        ["bash", "-c", printed], env=environment(), capture_output=True, text=True, timeout=60, check=True
    )
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2, seed 5", "rank 1 of 2, seed 5"]


def started_by(folder: Path, *words: str, **more: str) -> list[str]:
    """What the ranks of another launcher say."""
    told = {"UNISHARD_CONFIG": str(folder / "c.yaml"), "UNISHARD_OVERRIDES": '["training.seed=6"]', **more}
    done = subprocess.run([*words, SAYS], env=environment() | told, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))


TWO_RANKS = ["rank 0 of 2, seed 6", "rank 1 of 2, seed 6"]


@pytest.mark.deep
def test_the_launcher_of_deepspeed_starts_the_same_script(folder):
    hosts = base64.urlsafe_b64encode(json.dumps({"localhost": [0, 1]}).encode()).decode()
    words = [
        "-m",
        "deepspeed.launcher.launch",
        f"--world_info={hosts}",
        "--master_addr=127.0.0.1",
        "--master_port=29731",
        "--no_local_rank",
    ]
    assert started_by(folder, sys.executable, *words) == TWO_RANKS


@pytest.mark.deep
@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
def test_accelerate_launch_starts_the_same_script(folder):
    words = [
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes=2",
        "--num_machines=1",
        "--mixed_precision=no",
    ]
    more = {"HF_HOME": str(folder), "ACCELERATE_USE_CPU": "true"}
    assert (
        started_by(folder, sys.executable, *words, "--dynamo_backend=no", "--main_process_port=0", **more) == TWO_RANKS
    )


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
def test_mpirun_starts_the_same_script(folder):
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    words = ["mpirun", "-np", "2", "--oversubscribe", sys.executable]
    assert started_by(folder, *words, MASTER_ADDR="127.0.0.1", MASTER_PORT="29732", **root) == TWO_RANKS
