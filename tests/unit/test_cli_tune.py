"""`unishard tune` without a run: what the plan drops, what is measured, and what is written."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from running import run
from test_cli_plan import FACTORY

import unishard
from unishard.cli import tune
from unishard.tools.compare.measuring import Measured, Task, in_turns
from unishard.tools.compare.trials import Trial, own_trial, trials_of, words_of
from unishard.tools.compare.tuning import with_comment

CONFIG = """# ours
backend: fsdp  # as always
sharding: full_shard
training: {micro_batch_size: 2, gradient_accumulation_steps: 2}
"""


@pytest.fixture
def project(config: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config and a factory, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    Path("c.yaml").write_text(CONFIG)
    Path("factories.py").write_text(FACTORY)
    monkeypatch.delitem(sys.modules, "factories", raising=False)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    return config.parent


@pytest.fixture
def gives(project: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands in for the runs: seconds of a step by trial, and samples of an update."""
    asked: list[Trial] = []

    def give(seconds: Any, samples: Any = lambda trial: 8, failure: Any = lambda trial: None) -> list[Trial]:
        def run_all(cfg: unishard.Config, task: Task, rows: list[Trial], *_: object) -> list[Measured]:
            asked[:] = rows
            return [
                Measured(
                    row,
                    tuple(
                        {"step": step, "loss": 1.0, "step_seconds": seconds(row), "samples": samples(row)}
                        for step in (1, 2)
                    ),
                    failure=failure(row),
                )
                for row in rows
            ]

        monkeypatch.setattr(tune.script_runs, "run_all", run_all)
        return asked

    return give


ASK = ("tune", "c.yaml", "--model", "factories:build", "--seq-len", "64", "--processes-per-node", "2")


def test_what_does_not_fit_is_not_measured(gives: Any) -> None:
    asked = gives(lambda trial: 1.0)
    result = run(*ASK, "--memory", "192KiB", "--most", "100", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert asked[0] == ("fsdp", "full_shard", "none", 2, 2), "the config as it is comes first"
    assert {(trial.micro_batch_size * trial.accumulation) for trial in asked} == {4}, "the samples of an update stay"
    reasons = {left["reason"].partition(":")[0] for left in found["left_out"]}
    assert "does not fit" in reasons
    large = [left for left in found["left_out"] if left["candidate"] == "fsdp no_shard, none, 4 x 1"]
    assert large[0]["reason"].startswith("does not fit: needs ")
    assert {str(trial) for trial in asked}.isdisjoint(left["candidate"] for left in found["left_out"])


def test_what_recomputes_for_nothing_is_not_measured(gives: Any) -> None:
    asked = gives(lambda trial: 1.0)
    run(*ASK, "--memory", "8GiB", "--most", "100")
    assert {trial.recomputation for trial in asked} == {"none"}
    result = run(*ASK, "--memory", "8GiB", "--most", "3")
    assert len(asked) == 3
    assert "and activation_checkpointing none fits" in " ".join(result.stdout.split())
    assert "beyond the 3 that the plan expects to be fastest; raise --most" in " ".join(result.stdout.split())
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_the_best_is_written_with_the_reasons(gives: Any) -> None:
    gives(lambda trial: 0.5 if trial[:2] == ("deepspeed", "no_shard") and trial.micro_batch_size == 4 else 1.0)
    ask = (*ASK, "--memory", "8GiB", "--most", "100")
    shown = run(*ask)
    assert Path("c.yaml").read_text() == CONFIG
    assert "2.00 x as fast as before (fsdp full_shard, none, 2 x 2: 1 s)" in " ".join(shown.stdout.split())
    assert shown.stdout.splitlines()[-4:] == [
        "  backend: deepspeed",
        "  sharding.strategy: no_shard",
        "  training.micro_batch_size: 4",
        "  training.gradient_accumulation_steps: 1",
    ]
    assert run(*ask, "--write").exit_code == 0
    text = Path("c.yaml").read_text()
    assert text.startswith("# unishard tune: deepspeed no_shard, none, 4 x 1: 0.5 s a step, 2.00 x as fast as before")
    assert "# ours\nbackend: deepspeed  # as always\n" in text
    cfg = unishard.load("c.yaml")
    assert own_trial(cfg) == ("deepspeed", "no_shard", "none", 4, 1)
    assert run(*ask, "--write").exit_code == 0
    assert Path("c.yaml").read_text().count("# unishard tune: ") == 1, "the reasons of the last time are replaced"


def test_a_global_batch_size_that_the_ranks_give_drops_nothing(gives: Any) -> None:
    asked = gives(lambda trial: 1.0)
    with Path("c.yaml").open("a") as file:
        file.write("launch: {nodes: 2, processes_per_node: 2}\n")
    result = run("tune", "c.yaml", "--set", "training.global_batch_size=16", "-m", "x")
    assert result.exit_code == 0, result.output
    assert len(asked) == 8
    assert (
        "note: for 2 ranks, as launch.processes_per_node says; launch.nodes is 2, but only this host is measured"
        in result.stderr
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("--model", "factories:build", "--seq-len", "64", "--memory", "1KiB"),
            "and 7 larger ones: does not fit: needs ",
        ),
        (
            ("--set", "training.gradient_accumulation_steps=1", "--set", "training.micro_batch_size=1", "-m", "x"),
            "name other candidates",
        ),
    ],
)
def test_where_nothing_is_left_to_compare(gives: Any, arguments: tuple[str, ...], said: str) -> None:
    asked = gives(lambda trial: 1.0)
    result = run("tune", "c.yaml", "--backends", "fsdp", "--strategies", "full_shard", *arguments)
    assert (result.exit_code, result.stdout, asked) == (1, "", [])
    error = " ".join(result.stderr.split())
    assert "there is nothing to compare with the config as it is (fsdp full_shard, none, " in error
    assert "name other candidates: --backends, --strategies, or a larger training.micro_batch_size" in error
    assert said in error


def test_one_that_is_measured_is_not_called_the_fastest(gives: Any) -> None:
    gives(lambda trial: 1.0, failure=lambda trial: None if trial.micro_batch_size == 4 else "RuntimeError: no")
    result = run(*ASK, "--memory", "8GiB", "--most", "2", "--write")
    assert result.exit_code == 1
    said = " ".join(result.stdout.split())
    assert "RuntimeError: no" in said
    assert "no result: only " in said
    assert Path("c.yaml").read_text() == CONFIG


def test_a_difference_within_the_noise_changes_nothing(gives: Any) -> None:
    gives(lambda trial: 1.0 if trial.micro_batch_size == 2 else 0.995)
    found = json.loads(run(*ASK, "--memory", "8GiB", "--json").stdout)
    assert found["changes"] == []
    assert "is faster by only 0.5%" in found["reason"]


def test_a_script_that_ignores_the_batch_size_has_failed(gives: Any) -> None:
    gives(lambda trial: trial.accumulation, samples=lambda trial: 4 * trial.accumulation)
    result = run(*ASK, "--memory", "8GiB")
    said = " ".join(result.stdout.split())
    assert (
        "failed: an update took 4 samples, not 8; let the script take its batch size from cfg.training.micro_batch_size"
        in said
    )
    assert "best: fsdp full_shard, none, 2 x 2, as it is" in said


def test_where_all_fail(gives: Any) -> None:
    gives(lambda trial: 1.0, failure=lambda trial: "RuntimeError: no")
    result = run(*ASK, "--memory", "8GiB", "--most", "2")
    assert result.exit_code == 1
    assert "no candidate could be measured; the config as it is: RuntimeError: no" in " ".join(result.stdout.split())


def test_without_a_model_the_engines_still_refuse() -> None:
    cfg = unishard.load(
        {"backend": "fsdp", "sharding": "full_shard", "training": {"micro_batch_size": 3}, "offload": "cpu"}
    )
    found = trials_of(
        cfg, ["fsdp", "deepspeed"], ["full_shard", "no_shard"], words_of(cfg, []), 100, unishard.Topology(), None
    )
    assert found.kept[0] == own_trial(cfg)
    assert {trial.recomputation for trial in found.kept} == {"none"}
    assert {(trial.micro_batch_size, trial.accumulation) for trial in found.kept} == {(3, 1), (1, 3)}


def test_turns_go_forth_and_back() -> None:
    assert in_turns(3, 2) == [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)]


def test_the_first_line_of_editors_stays_first() -> None:
    text = "# yaml-language-server: $schema=s.json\n# unishard tune: old\n#   and more\nbackend: fsdp\n"
    assert (
        with_comment(text, ["# unishard tune: new"])
        == "# yaml-language-server: $schema=s.json\n# unishard tune: new\nbackend: fsdp\n"
    )
