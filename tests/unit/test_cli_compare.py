"""`unishard compare` without a run: what is refused, what a run is told, and the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from running import one_line, run

import unishard
from unishard.cli import script_runs
from unishard.tools.compare.candidates import Variant, candidates_of, overrides_of
from unishard.tools.compare.measuring import Measured, Task, _failure
from unishard.tools.compare.picture import svg_of
from unishard.tools.compare.records import Course, records_in
from unishard.tools.compare.table import distances, lines_of
from unishard.tools.launch.command import Script


def test_the_own_backend_comes_first() -> None:
    cfg = unishard.load({"backend": "fsdp", "sharding": "zero2"})
    assert candidates_of(cfg, None, None) == [("fsdp", "shard_grad_op"), ("deepspeed", "shard_grad_op")]
    assert candidates_of(cfg, "deepspeed", "ddp, zero3") == [("deepspeed", "no_shard"), ("deepspeed", "full_shard")]


def test_a_run_writes_nothing_outside_its_folder() -> None:
    given = {
        "backend": "fsdp",
        "logging": {"to": ["wandb", "tensorboard"], "dir": "runs", "wandb_mode": "offline"},
        "checkpoint": {"dir": "runs/a", "every_steps": 5, "on_signal": ["TERM"], "on_existing": "resume"},
        "profile": {"steps": [3], "dir": "runs"},
        "launch": {"nodes": "2:4", "max_restarts": 3, "endpoint": "head", "environment": {"A": "b"}},
    }
    cfg = unishard.load(given)
    changed = unishard.load(
        given, overrides_of(cfg, Variant("deepspeed", "no_shard"), Path("/o"), ["launch.processes_per_node=2"])
    )
    assert (changed.backend, changed.sharding.strategy) == ("deepspeed", "no_shard")
    assert (changed.logging.to, changed.logging.every_steps, changed.logging.dir) == (["jsonl"], 1, "/o")
    assert (changed.checkpoint.dir, changed.checkpoint.every_steps, changed.checkpoint.on_signal) == (
        "/o/checkpoints",
        None,
        [],
    )
    assert changed.profile.steps == []
    assert (changed.launch.nodes, changed.launch.max_restarts, changed.launch.environment) == (1, 0, {"A": "b"})


def records(*losses: float, seconds: float = 0.5) -> tuple[dict[str, float], ...]:
    return tuple(
        {
            "step": step,
            "loss": loss,
            "grad_norm": 2 * loss,
            "lr": 0.1,
            "step_seconds": seconds,
            "samples_per_second": 8 / seconds,
        }
        | {"memory_gib": 1.0 + step}
        for step, loss in enumerate(losses, 1)
    )


def test_the_table_has_80_columns_and_failed_rows() -> None:
    rows = [
        Measured(Variant("fsdp", "hybrid_shard_grad_op"), failure="ConfigError: " + "many words " * 20),
        Measured(Variant("deepspeed", "shard_optimizer"), records(4, 2, 1, seconds=1), 12.3),
        Measured(Variant("fsdp", "shard_optimizer"), records(4, 2.5, 1), 4.5),
    ]
    lines = list(lines_of(rows))
    assert max(map(len, lines)) <= 80
    assert lines[1].startswith("fsdp hybrid_shard_grad_op failed: ConfigError: many")
    table = [line.split() for line in lines if line.startswith(("deepspeed", "fsdp s"))]
    assert table == [
        ["deepspeed", "shard_optimizer", "1", "8", "4.00", "12.3", "-", "-"],
        ["fsdp", "shard_optimizer", "0.5", "16", "4.00", "4.5", "2.5e-01", "2.5e-01"],
    ]
    assert lines[-1] == "fastest: fsdp shard_optimizer, 2.00 x the next one"
    assert distances(rows)[:2] == [None, None]
    json.dumps([row.as_json() for row in rows])


def working(*losses: float) -> tuple[dict[str, float], ...]:
    return tuple(
        record | {"tflops": 98.9, "mfu": 0.1, "sent_gib": 1.5, "tokens_per_second": 1234.0}
        for record in records(*losses)
    )


def test_work_and_traffic_of_a_rank() -> None:
    rows = [
        Measured(Variant("fsdp", "hybrid_shard_grad_op"), working(4, 2, 1), 1.0),
        Measured(Variant("deepspeed", "no_shard"), records(4)),
    ]
    lines = list(lines_of(rows))
    assert max(map(len, lines)) <= 80
    assert lines[4].split() == ["of", "one", "rank", "TFLOP/s", "MFU", "sends", "GiB"]
    assert [line.split()[2:] for line in lines[5:7]] == [["98.9", "10.0%", "1.5"], ["-", "-", "-"]]
    assert "(sends: in a step, by the formulas of unishard plan, not counted)" in lines
    assert next(line for line in lines_of(rows, 197.8) if "98.9" in line).split()[3] == "50.0%"
    assert (rows[0].as_json(989.0)["mfu"], rows[0].as_json()["planned_sent_gib"]) == (pytest.approx(0.1), 1.5)


def test_without_a_script_or_a_model_there_is_nothing_to_run(config: Path) -> None:
    config.write_text("backend: fsdp\n")
    assert run("compare", "c.yaml").stderr == "there is nothing to run; give SCRIPT, or --model MODEL for random data\n"


def test_the_warm_up_is_not_timed() -> None:
    slow, fast = records(1, 1, 1, seconds=9), records(1, 1, 1, 1)
    assert Measured(Variant("a", "b"), slow + fast).median("step_seconds") == 0.5
    assert len(Measured(Variant("a", "b"), fast[:1]).timed) == 1


def test_records_of_a_killed_run() -> None:
    text = (
        '{"step": 1, "loss": null}\n{"step": 2, "eval/loss": 1.0}\n3\n{"step": 2, "loss": 0.5, "samples": '
        '4}\n{"step": 3, "lo'
    )
    found = Course.of(records_in(text))
    assert (found.steps, found.losses, found.samples) == ((1, 2), (None, 0.5), (None, 4))


@pytest.mark.parametrize(
    ("code", "text", "said"),
    [
        (
            1,
            "unishard: rank 1 of 2 raised ValueError: broken (a.py:3 in f)\nTraceback\nValueError: broken\n",
            "ValueError: broken (a.py",
        ),
        (
            1,
            "Traceback:\n  x\na.SomeError: no\nunishard launch: rank 0 has ended\n",
            "a.SomeError: no",
        ),
        (2, "c.yaml:3: wrong\n", "c.yaml:3: wrong"),
        (7, "", "exit code 7"),
        (0, "done\n", "no step was logged; let the script load its config with unishard.load(), without a path"),
        (None, "", "2 of 20 steps in 60 s; raise --timeout, or see"),
    ],
)
def test_a_failure_is_one_line(tmp_path: Path, code: int | None, text: str, said: str) -> None:
    output = tmp_path / "output.txt"
    output.write_text(text)
    found = _failure(code, output, Task(Path("c.yaml"), Script("train.py"), 20, 60), 2)
    assert found.startswith(said)
    assert "\n" not in found


def test_rounds_go_forth_and_back_and_a_failed_one_rests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def measured(cfg: object, task: object, row: Variant, changes: object, folder: Path) -> Measured:
        ran.append(folder.name)
        failure = "broken" if row.backend == "deepspeed" else None
        return Measured(row, () if failure else records(1, 1, seconds=float(len(ran))), 2.0, failure)

    monkeypatch.setattr(script_runs, "_measured", measured)
    rows = [Variant("fsdp", "no_shard"), Variant("deepspeed", "no_shard"), Variant("fsdp", "full_shard")]
    cfg = unishard.load({"backend": "fsdp"})
    found = script_runs.run_all(cfg, Task(Path("c.yaml"), Script("t.py"), 2, 60, rounds=2), rows, [], tmp_path)
    assert ran == ["fsdp-no_shard", "deepspeed-no_shard", "fsdp-full_shard", "fsdp-full_shard-2", "fsdp-no_shard-2"]
    assert [row.failure for row in found] == [None, "broken", None]
    assert (found[0].median("step_seconds"), found[2].median("step_seconds")) == (3.0, 3.5), "of steps of both rounds"
    assert len(found[0].records) == 2, "the curve is that of the first"


def test_the_picture_has_a_curve_for_each_run_and_none_for_a_failed_one() -> None:
    rows = [
        Measured(Variant("fsdp", "full_shard"), records(4, 2, 1), 1.0),
        Measured(Variant("deepspeed", "full_shard"), records(4, 2, 1, seconds=1), 1.0),
        Measured(Variant("fsdp", "no_shard"), failure="ConfigError: no"),
    ]
    text = svg_of(rows)
    shown = {
        name for name in ("fsdp full_shard", "deepspeed full_shard", "fsdp no_shard") if f"<!-- {name} -->" in text
    }
    assert shown == {"fsdp full_shard", "deepspeed full_shard"}


def test_a_picture_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("backend: fsdp\n")
    (tmp_path / "train.py").write_text("")
    absent = tmp_path / "no" / "all.svg"
    result = run("compare", str(tmp_path / "c.yaml"), "--picture", str(absent), str(tmp_path / "train.py"))
    assert result.exit_code == 2
    assert f"there is no folder {absent.parent}; make it" in one_line(result.stderr)
