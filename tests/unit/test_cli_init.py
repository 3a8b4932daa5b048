from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from running import TINY, run

import unishard

OLD = (
    '{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": true}, '
    '"gradient_clipping": 0.5}'
)


def test_yes_asks_nothing_and_writes_a_config_that_loads(config: Path) -> None:
    result = run("init", "--yes", "-o", "c.yaml")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "c.yaml: written\nnext: unishard check c.yaml\n", "")
    cfg = unishard.load(config)
    assert (cfg.backend, cfg.sharding.strategy, cfg.precision.compute) == ("fsdp", "full_shard", "bf16")
    for backend in unishard.available():
        unishard.translate(cfg, backend=backend).check(strict=True)


def test_each_field_stands_below_what_it_is(config: Path) -> None:
    run("init", "--yes", "-o", "c.yaml")
    lines = config.read_text().splitlines()
    assert "  # Samples in one forward on one rank.\n  micro_batch_size: 1" in config.read_text()
    fields = [number for number, line in enumerate(lines) if line and "#" not in line]
    assert all("#" in lines[number - 1] for number in fields)
    assert max(map(len, lines)) <= 120


def test_what_is_set_is_not_asked_and_brings_what_it_needs(config: Path) -> None:
    result = run(
        "init",
        "--yes",
        "-o",
        "c.yaml",
        "--set",
        "scheduler=cosine",
        "--set",
        "optimizer.lr=1e-4",
        "--set",
        "backend=deepspeed",
    )
    assert result.exit_code == 0
    cfg = unishard.load(config)
    assert (cfg.scheduler.name, cfg.scheduler.total_steps, cfg.optimizer.lr, cfg.backend) == (
        "cosine",
        1000,
        1e-4,
        "deepspeed",
    )


def test_a_file_that_is_there_stays_unless_forced(config: Path) -> None:
    config.write_text("mine")
    result = run("init", "--yes", "-o", "c.yaml")
    assert (result.exit_code, config.read_text()) == (1, "mine")
    assert result.stderr == "c.yaml: exists; name another file with -o, or overwrite it with --force\n"
    assert run("init", "--yes", "--force", "-o", "c.yaml").exit_code == 0
    assert unishard.load(config).backend == "fsdp"


def test_without_a_terminal_it_says_so(config: Path) -> None:
    result = run("init", "-o", "c.yaml", answers="fsdp\n")
    assert (result.exit_code, config.exists()) == (1, False)
    assert result.stderr.startswith("cannot ask questions without a terminal; add --yes")


def test_what_the_engine_cannot_have_writes_nothing(config: Path) -> None:
    result = run("init", "--yes", "-o", "c.yaml", "--set", "precision=bf16", "--set", "precision.accumulate=bf16")
    assert (result.exit_code, config.exists()) == (1, False)
    assert result.stderr.startswith('precision.accumulate: "bf16" is not supported by fsdp: ')


def test_an_old_config_of_another_tool_answers_what_it_says(config: Path) -> None:
    Path("ds.json").write_text(OLD)
    result = run("init", "--yes", "--from", "ds.json", "-o", "c.yaml")
    assert result.exit_code == 0
    assert "needs input: training.micro_batch_size comes from " in result.stderr
    assert "not in the existing config: optimizer.lr; using 0.001" in result.stderr
    assert result.stdout == "c.yaml: written\nnext: unishard check c.yaml --set training.micro_batch_size=VALUE\n"
    with pytest.raises(unishard.ConfigError, match=r"^\S*c\.yaml:\d+: training\.micro_batch_size: needs a value"):
        unishard.load(config)
    cfg = unishard.load(config, ["training.micro_batch_size=2"])
    assert (cfg.backend, cfg.sharding.strategy, cfg.precision.compute) == ("deepspeed", "full_shard", "bf16")
    assert (cfg.training.gradient_clipping, cfg.training.micro_batch_size) == (0.5, 2)


def test_an_old_config_can_be_changed_on_the_way(config: Path) -> None:
    Path("old.yaml").write_text(
        "backend: fsdp\nscheduler: {name: cosine, total_steps: 50, min_lr_ratio: 0.1}\nsharding: {units: [Block]}\n"
    )
    run(
        "init",
        "--yes",
        "--from",
        "old.yaml",
        "-o",
        "c.yaml",
        "--set",
        "scheduler.name=constant",
        "--set",
        "sharding.strategy=no_shard",
    )
    cfg = unishard.load(config)
    assert (cfg.scheduler.name, cfg.scheduler.total_steps, cfg.sharding.units) == ("constant", None, "auto")


@pytest.mark.parametrize("source", sorted(Path(TINY).parent.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_config_that_comes_with_unishard_means_the_same_afterwards(config: Path, source: Path) -> None:
    old = unishard.load(source)
    assert run("init", "--yes", "--from", str(source), "-o", "c.yaml").exit_code == 0
    assert unishard.load(config) == old


def converse(answers: list[str], *arguments: str) -> tuple[int, str]:
    """Answers the questions on a real terminal; the exit status, and what stood there."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "unishard", "init", *arguments],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        close_fds=True,
    )
    os.close(follower)
    os.write(leader, "".join(f"{answer}\n" for answer in answers).encode())
    shown = b""
    try:
        while part := os.read(leader, 2**16):
            shown += part
    except OSError:  # the other end is closed
        pass
    os.close(leader)
    return process.wait(60), shown.decode().replace("\r\n", "\n")


def test_a_conversation(config: Path) -> None:
    answers = ["deepspeed", "zero2", "", "four", "4", *[""] * 20]
    status, shown = converse(answers, "-o", "c.yaml")
    assert status == 0, shown
    cfg = unishard.load(config)
    assert (cfg.backend, cfg.sharding.strategy, cfg.precision.compute, cfg.training.micro_batch_size) == (
        "deepspeed",
        "shard_grad_op",
        "bf16",
        4,
    )
    assert "Engine (deepspeed, fsdp) [fsdp]:" in shown
    assert "training.micro_batch_size: must be a whole number of at least 1, got 'four' (text)" in " ".join(
        shown.split()
    )
    assert re.search(r"What is sharded across the ranks \(no_shard,[^\[]*\n    \w+", shown), (
        "a long question is wrapped between words"
    )
    assert "hybrid_shard_grad_op)" in shown.split()
    assert re.search(r"Optimizer \(adamw, .*\) \[adamw\]:", shown)
    assert "Where the sharded parameters live" not in shown, "nothing to ask with zero2"
