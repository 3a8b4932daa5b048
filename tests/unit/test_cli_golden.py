"""`unishard compare` with losses to hold, without a run: what is refused, golden files, and what the text and the exit status say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from running import run

import unishard
from unishard.cli import script_runs
from unishard.tools.compare.candidates import Variant
from unishard.tools.compare.golden import facts_of, golden_text, read_golden
from unishard.tools.compare.measuring import Measured, Task

RECORDS = tuple({"step": step, "loss": 2.0 / step, "grad_norm": 1.0, "lr": 0.1, "samples": 8} for step in range(1, 5))


def test_a_golden_file_keeps_records_and_config(tmp_path: Path) -> None:
    cfg = unishard.load({"backend": "fsdp", "training": {"seed": 3}})
    (tmp_path / "g").write_text(golden_text(RECORDS, cfg))
    found = read_golden(tmp_path / "g")
    assert found.course.losses == (2.0, 1.0, 2.0 / 3, 0.5)
    assert found.facts == json.loads(json.dumps(facts_of(cfg)))
    assert found.facts["training.seed"] == 3


asked: list[tuple[int, int, tuple[int, ...]]] = []
"""Of each call: candidates, steps, and those whose modules are measured."""


@pytest.fixture
def gives(monkeypatch: pytest.MonkeyPatch, config: Path):
    """Stands in for the runs."""
    asked.clear()
    config.write_text("backend: fsdp\n")

    def give(*changes: dict[str, float], failure: str | None = None, rms: float = 1.0) -> None:
        records = tuple(record | change for record, change in zip(RECORDS, [*changes, {}, {}, {}, {}], strict=False))

        def run_all(cfg: unishard.Config, task: Task, rows: list[Variant], *_: object) -> list[Measured]:
            asked.append((len(rows), task.steps, task.module_steps))
            lines = [
                {"step": step, "module": name, "output_rms": rms, "output_mean": 0.0}
                for step in task.module_steps
                for name in "ab"
            ]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            return [Measured(row, records, 1.0, failure, text) for row in rows]

        monkeypatch.setattr(script_runs, "run_all", run_all)

    return give


def test_the_gate(gives) -> None:
    gives()
    assert run("compare", "c.yaml", "--write-golden", "g", "-m", "x").stdout == "g: 4 steps written\n"
    written = json.loads(run("compare", "c.yaml", "--write-golden", "g", "--json", "-m", "x").stdout)
    assert written == {"golden": "g", "steps": 4, "modules": False}
    same = run("compare", "c.yaml", "--golden", "g", "-m", "x")
    assert (same.exit_code, same.stdout.split(";")[0]) == (0, "same: fsdp full_shard and g in 4 steps")
    gives({}, {"loss": 1.01})
    other = run("compare", "c.yaml", "--golden", "g", "-m", "x")
    assert other.exit_code == 1
    assert other.stdout.startswith("different: fsdp full_shard and g at step 2: loss is 1.01, not 1.0")
    assert max(map(len, other.stdout.splitlines())) <= 80
    found = json.loads(run("compare", "c.yaml", "--golden", "g", "--json", "-m", "x").stdout)
    assert (found["same"], found["comparisons"][0]["first_difference"]["step"]) == (False, 2)


def test_a_plain_log_without_norms_is_golden(gives) -> None:
    gives()
    Path("log.jsonl").write_text(
        "".join(json.dumps({"step": each["step"], "loss": each["loss"]}) + "\n" for each in RECORDS)
    )
    assert run("compare", "c.yaml", "--golden", "log.jsonl", "-m", "x").exit_code == 0


def test_a_run_that_fails_is_an_error(gives) -> None:
    gives(failure="ValueError: broken")
    result = run("compare", "c.yaml", "--write-golden", "g", "-m", "x")
    assert (result.exit_code, result.stderr) == (2, "fsdp full_shard: ValueError: broken\n")
    assert not Path("g").exists()


def test_the_first_module_that_differs(gives) -> None:
    gives()
    written = run("compare", "c.yaml", "--write-golden", "g", "--modules", "--steps", "4", "-m", "x")
    assert written.stdout == "g: 4 steps written, with modules\n"
    assert len(Path("g").read_text().splitlines()) == 1 + 4 + 8
    assert run("compare", "c.yaml", "--golden", "g", "-m", "x").exit_code == 0
    gives({}, {}, {"loss": 0.7}, rms=1.5)
    other = run("compare", "c.yaml", "--golden", "g", "-m", "x")
    assert asked[-2:] == [(1, 20, ()), (1, 3, (2, 3))]
    assert "\nfirst module that differs: a, in the forward of step 2: rms of its output is\n" in other.stdout
    assert max(map(len, other.stdout.splitlines())) <= 80
    found = json.loads(run("compare", "c.yaml", "--golden", "g", "--json", "-m", "x").stdout)["comparisons"][0][
        "first_module"
    ]
    assert (found["module"], found["what"], found["step"], found["relative"]) == ("a", "output", 2, 0.5)
    asked.clear()
    assert "first module" not in run("compare", "c.yaml", "--golden", "g", "--no-modules", "-m", "x").stdout
    assert len(asked) == 1


def test_what_to_type_where_modules_are_not_known(gives) -> None:
    gives()
    run("compare", "c.yaml", "--write-golden", "g", "-m", "x")
    gives({"loss": 3.0})
    said = run("compare", "c.yaml", "--golden", "g", "-m", "x").stdout
    assert "unishard compare CFG --write-golden g --modules SCRIPT" in " ".join(said.split())
    compiled = run("compare", "c.yaml", "--same", "--set", "compile=per_block", "-m", "x").stdout
    assert "modules inside compiled blocks are not seen; add --set compile=none" not in " ".join(compiled.split()), (
        "the runs agree"
    )


def test_between_engines_both_run_again(gives, monkeypatch: pytest.MonkeyPatch) -> None:
    gives()
    same = script_runs.run_all

    def run_all(cfg: unishard.Config, task: Task, rows: list[Variant], *rest: object) -> list[Measured]:
        one, *others = same(cfg, task, rows, *rest)
        first = tuple(record | {"grad_norm": 2.0} for record in one.records)
        return [replace(one, records=first, modules=one.modules.replace("1.0", "3.0", 1)), *others]

    monkeypatch.setattr(script_runs, "run_all", run_all)
    said = " ".join(run("compare", "c.yaml", "--same", "--set", "compile=per_block", "-m", "x").stdout.split())
    assert asked == [(2, 20, ()), (2, 1, (1,))]
    assert "first module that differs: a, in the forward of step 1" in said
    assert "modules inside compiled blocks are not seen; add --set compile=none to see them" in said
