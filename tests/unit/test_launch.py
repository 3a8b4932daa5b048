"""What `unishard launch` starts: the section, the torchrun command, the config that the script gets, jobs, and
errors."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ruamel.yaml import YAML
from running import run

import unishard
from unishard import ConfigError
from unishard.config import Config, LaunchSettings
from unishard.config.loading.launched import CONFIG, OVERRIDES, variables
from unishard.tools.launch import running
from unishard.tools.launch.command import Host, Script, ShellText, TorchrunCommand, command_of
from unishard.tools.launch.slurm import batch_script

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Script("train.py", ("--log", "3"))


def config(**launch: Any) -> Config:
    return unishard.load({"launch": launch})


# -- the section -----------------------------------------------------------------------------------


def test_it_says_how_many_nodes() -> None:
    assert unishard.load({"launch": 4}).launch.processes_per_node == 4
    assert [
        (cfg.launch.min_nodes, cfg.launch.max_nodes)
        for cfg in (config(), config(nodes=3), config(nodes="2:4"), config(nodes="5"))
    ] == [
        (1, 1),
        (3, 3),
        (2, 4),
        (5, 5),
    ]


def test_training_does_not_depend_on_it() -> None:
    rows = {
        path: line
        for path, line in ((line.path, line) for line in unishard.translate(config(nodes=4)).report)
        if path.startswith("launch")
    }
    assert set(rows) == {f"launch.{name}" for name in LaunchSettings.model_fields}
    assert {line.fit for line in rows.values()} == {unishard.Fit.EXACT}
    assert unishard.translate(config(nodes=4)).native == unishard.translate(config()).native


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("launch", "place", "line"),
    [
        ({}, Host(processes="2"), "torchrun --standalone --nproc-per-node 2 -- train.py --log 3"),
        (
            {"max_restarts": 2},
            None,
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node gpu --max-restarts 2 -- "
            "train.py --log 3",
        ),
        (
            {
                "nodes": "2:4",
                "processes_per_node": 8,
                "endpoint": "head",
                "rendezvous_options": {"join_timeout": 60, "read_timeout": 5},
            },
            None,
            "torchrun --nnodes 2:4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint head:29500 --rdzv-id "
            "unishard --rdzv-conf join_timeout=60,read_timeout=5 -- train.py --log 3",
        ),
        (
            {
                "nodes": 2,
                "processes_per_node": 8,
                "endpoint": "[fd00::1]:7",
                "rendezvous": "static",
                "environment": {"A": "b c", "N": 3},
            },
            Host(node_rank=1),
            "A='b c' N=3 torchrun --nnodes 2 --nproc-per-node 8 --node-rank 1 --rdzv-backend static --rdzv-endpoint "
            "'[fd00::1]:7' --rdzv-id unishard -- train.py --log 3",
        ),
    ],
)
def test_the_torchrun_line(launch: dict[str, Any], place: Host | None, line: str) -> None:
    assert command_of(config(**launch), SCRIPT, {}, place).line() == line


def test_signals_that_save_reach_the_ranks_and_leave_time_for_it() -> None:
    cfg = unishard.load({"checkpoint": {"dir": "runs", "on_signal": ["TERM", "USR1"]}})
    line = command_of(cfg, Script("pkg.train", module=True), {}).line()
    assert "--signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 -m pkg.train" in line
    assert line.startswith("TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300 ")


def test_torchrun_takes_it_with_a_script_s_option_that_is_short_for_its_own() -> None:
    from torch.distributed.run import get_args_parser

    cfg = config(
        nodes="1:2", processes_per_node=2, endpoint="head:1", max_restarts=3, rendezvous_options={"join_timeout": 60}
    )
    args = get_args_parser().parse_args(list(command_of(cfg, SCRIPT, {}).words[1:]))
    assert (args.nnodes, args.nproc_per_node, args.rdzv_backend, args.rdzv_endpoint) == ("1:2", "2", "c10d", "head:1")
    assert (args.max_restarts, args.rdzv_conf, args.training_script, args.training_script_args) == (
        3,
        "join_timeout=60",
        "train.py",
        ["--log", "3"],
    )
    assert get_args_parser().parse_args(list(command_of(config(), SCRIPT, {}).words[1:])).standalone


# -- the config that the script gets ---------------------------------------------------------------


def test_a_script_loads_what_launch_was_given(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text("training: {seed: 3}\n")
    for name, value in variables(str(config), ["training.seed=4", "optimizer.lr=1"]).items():
        monkeypatch.setenv(name, value)
    assert unishard.load().training.seed == 4
    cfg = unishard.load(overrides=["training.seed=5"])
    assert (cfg.training.seed, cfg.optimizer.lr) == (5, 1)
    assert unishard.load({}).training.seed == 0


def test_without_launch_it_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONFIG, raising=False)
    with pytest.raises(
        ConfigError,
        match=r"without it; start it with `unishard launch cfg.yaml train.py`, set the environment variable",
    ):
        unishard.load()
    monkeypatch.setenv(CONFIG, "c.yaml")
    monkeypatch.setenv(OVERRIDES, "training.seed=3")
    with pytest.raises(ConfigError, match=r"UNISHARD_OVERRIDES is 'training.seed=3', not a JSON list of overrides"):
        unishard.load()


# -- the command line ------------------------------------------------------------------------------


@pytest.fixture
def project(config: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", os.environ["PATH"])
    config.write_text("training: {seed: 3}\nlaunch: {processes_per_node: 2}\n")
    Path("train.py").write_text("")
    return config


# -- jobs ------------------------------------------------------------------------------------------


def test_bash_reads_the_batch_script(project: Path) -> None:
    setup = 'launch.slurm={gpus-per-node: 8, setup: "source env.sh"}'
    saves = ["--set", "checkpoint.dir=runs/my run", "--set", "checkpoint.on_signal=[USR1]"]
    result = run(
        "launch",
        "c.yaml",
        "--nodes",
        "2:3",
        "--set",
        setup,
        *saves,
        "--slurm",
        "-o",
        "job.sh",
        "train.py",
        "it's",
        "$HOME",
    )
    assert result.exit_code == 0, result.output
    assert result.stdout == "job.sh: written; submit it with: sbatch job.sh\n"
    subprocess.run(["bash", "-n", "job.sh"], check=True)


@pytest.mark.parametrize("command", [("launch", "c.yaml", "train.py"), ("plan", "c.yaml", "--model", "model")])
def test_a_command_that_needs_torch_says_so_in_one_line(
    project: Path, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    absent = [name for name in sys.modules if name.startswith(("unishard.tools.launch.running", "unishard.tools.plan"))]
    for name in absent:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    result = run(*command)
    told = f"unishard {command[0]} needs torch, which is not installed; pip install torch\n"
    assert (result.exit_code, result.stderr) == (1, told)


def test_the_batch_script_starts_torchrun_with_these_words(project: Path, tmp_path: Path) -> None:
    """The script runs under bash with stand-ins for Slurm's commands."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in {
        "scontrol": "echo node7\necho node8",
        "srun": 'printf \'%s\\n\' "$UNISHARD_CONFIG" "$@"',
    }.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    cfg = config(nodes="1:2", processes_per_node=2)
    text = batch_script(cfg, Script("train.py", ("it's", "$HOME")), {"UNISHARD_CONFIG": "/my runs/c.yaml"}, "train")
    environ = os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "41",
        "SLURM_JOB_NUM_NODES": "2",
    }
    environ["SLURM_JOB_NODELIST"] = "node[7-8]"
    done = subprocess.run(["bash", "-euc", text], env=environ, capture_output=True, text=True, check=True)
    said = done.stdout.splitlines()
    assert said[:2] == ["/my runs/c.yaml", "--kill-on-bad-exit=1"]
    assert said[2:] == [
        *(
            "torchrun",
            "--nnodes",
            "1:2",
            "--nproc-per-node",
            "2",
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            "node7:20041",
        ),
        *("--rdzv-id", "41", "train.py", "it's", "$HOME"),
    ]


def test_submitting_prints_the_job(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/bash\ncat > submitted.sh\necho '17;cluster'\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert run("launch", "c.yaml", "--slurm", "train.py").stdout == "submitted job 17\n"
    assert Path("submitted.sh").read_text().startswith("#!/bin/bash\n#SBATCH --job-name=train\n")
    sbatch.write_text("#!/bin/bash\necho 'invalid partition' >&2\nexit 1\n")
    result = run("launch", "c.yaml", "--slurm", "train.py")
    assert (result.exit_code, result.stderr) == (
        1,
        "sbatch refuses the script (invalid partition); change launch.slurm, and see the script with --dry-run\n",
    )


def test_the_manifest_of_the_example_starts_torchrun_in_each_pod() -> None:
    job = YAML(typ="safe").load((ROOT / "examples" / "train_gpt.k8s.yaml").read_text(encoding="utf-8"))
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {*replicas} == {"Master", "Worker"}
    for name, role in replicas.items():
        (container,) = role["template"]["spec"]["containers"]
        program, script, *arguments = container["command"]
        assert (name, program) in (("Master", "torchrun"), ("Worker", "torchrun"))
        assert (ROOT / script).is_file()
        assert arguments[::2] == ["--set"] * len(arguments[::2])
        assert unishard.load({}, arguments[1::2]).precision.compute == "bf16"
        assert container["resources"]["limits"]["nvidia.com/gpu"] == int(job["spec"]["nprocPerNode"])
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in role["template"]["spec"]["volumes"]}


def test_a_command_is_quoted_for_a_shell() -> None:
    command = TorchrunCommand(("torchrun", ShellText("$head:$port"), "a b", "$HOME"), {"A": "it's"})
    assert command.line() == "A='it'\"'\"'s' torchrun \"$head:$port\" 'a b' '$HOME'"


def test_of_failures_in_one_second_the_one_that_says_why_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[Any] = [
        "To enable traceback see: ...",
        {"message": "RankMismatchError: rank 2 raised"},
        {"message": "ValueError: a sample"},
    ]
    failures = {rank: SimpleNamespace(exitcode=1, message=message, timestamp=7) for rank, message in enumerate(said)}
    error: Any = SimpleNamespace(failures=failures)
    assert running._failed(error) == 1
    assert capsys.readouterr().err == "unishard launch: rank 2 has ended with exit code 1; its own message is above\n"


def test_a_rank_that_ends_because_of_one_that_torchrun_does_not_list_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failure = SimpleNamespace(
        exitcode=1, message={"message": "RankMismatchError: rank 1 raised ValueError: a sample"}, timestamp=7
    )
    error: Any = SimpleNamespace(failures={0: failure})
    assert running._failed(error) == 1
    because = "rank 0 has ended with exit code 1 because rank 1 raised ValueError: a sample; its own message is above\n"
    assert capsys.readouterr().err == f"unishard launch: {because}"


def test_a_rank_that_gloo_aborts_may_have_run_other_modules(capsys: pytest.CaptureFixture[str]) -> None:
    """torchrun ends the other ranks, which then say nothing."""
    codes = {0: -signal.SIGABRT, 1: -signal.SIGTERM}
    failures = {rank: SimpleNamespace(exitcode=code, message="", timestamp=7) for rank, code in codes.items()}
    error: Any = SimpleNamespace(failures=failures)
    assert running._failed(error) == 128 + signal.SIGABRT
    hint = "if it wrote that gloo received another size, ranks ran different modules: see sharding.conditional_modules"
    assert capsys.readouterr().err == f"unishard launch: rank 0 was killed by SIGABRT; {hint}\n"


def test_a_host_that_does_not_answer_is_named_while_it_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = "{}:{}".format(*listener.getsockname())
        running._say_if_silent(endpoint)
        assert capsys.readouterr().err == ""
    running._say_if_silent(endpoint)
    said = capsys.readouterr().err
    assert said.startswith(f"unishard launch: waits for {endpoint}, where nothing answers ([Errno 111] ")
    assert running._PATIENCE + running._ATTEMPT <= 15
