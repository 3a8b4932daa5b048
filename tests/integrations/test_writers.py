"""What each destination of `logging.to` writes, also after a resume."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import unishard
from unishard.contract.plan import ObserveSpec
from unishard.engine.resolve import observe_spec, text_of
from unishard.observe.destinations.jsonl import JsonLines
from unishard.observe.destinations.progress import ProgressLine
from unishard.observe.destinations.table import WRITERS, open_writer

VALUES = {"loss": 2.5, "lr": 3e-4}


def config(to: str, directory: Path, **fields: Any) -> unishard.Config:
    return unishard.load({"logging": {"to": [to], "dir": str(directory), **fields}})


def spec(cfg: unishard.Config) -> ObserveSpec:
    return observe_spec(cfg, text_of(cfg))


def lines(directory: Path, name: str = "log.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


def write(cfg: unishard.Config, *steps: int, resumed: int | None = None, loss: float = 2.5) -> None:
    (name,) = cfg.logging.to
    writer = open_writer(name, spec(cfg))
    if resumed is not None:
        writer.resume(resumed)
    for step in steps:
        writer.write(step, {"loss": loss, "lr": 3e-4})
    writer.close()


def test_the_table_has_every_destination() -> None:
    (kind,) = unishard.config.Logging.model_fields["to"].annotation.__args__
    assert tuple(WRITERS) == kind.__args__


# -- JSON lines ------------------------------------------------------------------------------------


def test_one_line_for_each_record(tmp_path: Path) -> None:
    write(config("jsonl", tmp_path), 10, 20)
    assert lines(tmp_path) == [{"step": 10, **VALUES}, {"step": 20, **VALUES}]


def test_a_resumed_run_has_no_step_twice(tmp_path: Path) -> None:
    cfg = config("jsonl", tmp_path)
    write(cfg, 10, 20, 30)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 40, "lo')  # killed while it wrote
    write(cfg, 30, 40, resumed=20, loss=1.0)
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [(10, 2.5), (20, 2.5), (30, 1.0), (40, 1.0)]


def test_a_new_run_sets_the_file_of_another_aside(tmp_path: Path) -> None:
    cfg = config("jsonl", tmp_path)
    for loss in (1.0, 2.0, 3.0):
        write(cfg, 10, loss=loss)
    found = [lines(tmp_path, name)[0]["loss"] for name in ("log-1.jsonl", "log-2.jsonl", "log.jsonl")]
    assert found == [1.0, 2.0, 3.0]


def test_numbers_that_json_does_not_have_are_null(tmp_path: Path) -> None:
    writer = JsonLines(spec(config("jsonl", tmp_path)))
    writer.write(1, {"grad_norm": float("inf"), "loss": float("nan")})
    writer.close()
    assert lines(tmp_path) == [{"step": 1, "grad_norm": None, "loss": None}]


# -- the progress line -----------------------------------------------------------------------------


def shown(*, terminal: bool, total: int | None = None) -> str:
    file = io.StringIO()
    schedule = {"scheduler": {"name": "linear", "total_steps": total}} if total else {}
    console = Console(file=file, force_terminal=terminal, width=200, _environ={"TERM": "xterm"})
    writer = ProgressLine(spec(unishard.load({"logging": ["progress"], **schedule})), console)
    for step in (10, 20):
        writer.write(
            step,
            {
                **VALUES,
                "tokens_per_second": 12345.0,
                "samples_per_second": 3.0,
                "skipped_updates": 0.0,
                "accuracy": 0.5,
            },
        )
    writer.close()
    return file.getvalue()


def test_plain_lines_without_a_terminal() -> None:
    assert shown(terminal=False).splitlines() == [
        f"step {step}  loss 2.5000  lr 3.00e-04  12.3k tokens/s  accuracy 0.5" for step in (10, 20)
    ]
    assert shown(terminal=False, total=100).splitlines()[1].startswith("step 20/100  left 0:00:0")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_step_is_shown_once_with_all_that_is_known_of_it(terminal: bool) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=200, _environ={"TERM": "xterm"})
    writer = ProgressLine(spec(unishard.load({"logging": ["progress"]})), console)
    for values in (VALUES, {"checkpoint_seconds": 0.5}, {"accuracy": 0.25}):
        writer.write(10, values)
    writer.close()
    if terminal:
        last = file.getvalue().rpartition("step 10")[2]
        assert last.startswith("  loss 2.5000  lr 3.00e-04  checkpoint 0.5 s  accuracy 0.25")
    else:
        assert file.getvalue() == "step 10  loss 2.5000  lr 3.00e-04\nstep 10  accuracy 0.25\n"


def test_one_line_in_a_terminal() -> None:
    found = shown(terminal=True)
    assert "\x1b[" in found
    assert "step 20  loss 2.5000" in found


# -- the libraries ---------------------------------------------------------------------------------


def test_tensorboard_drops_the_steps_after_a_resume(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    cfg = config("tensorboard", tmp_path)
    write(cfg, 10, 20, 30)
    write(cfg, 30, 40, resumed=20, loss=1.0)
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (10, 2.5),
        (20, 2.5),
        (30, 1.0),
        (40, 1.0),
    ]


def test_wandb_writes_an_offline_run_and_continues_it(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    cfg = config(
        "wandb",
        tmp_path,
        wandb_mode="offline",
        project="llama",
        run_name="first",
        wandb_group="sweep",
        wandb_entity="us",
    )
    write(cfg, 10, 20)
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    name = (tmp_path / "wandb-run-id").read_text().strip()
    assert list(run.glob(f"run-{name}.wandb"))
    write(cfg, 30, resumed=20)
    assert (tmp_path / "wandb-run-id").read_text().strip() == name


@pytest.mark.filterwarnings("ignore:.*noload")  # MLflow 3.17 with SQLAlchemy 2.1
def test_mlflow_has_no_step_twice(tmp_path: Path) -> None:
    pytest.importorskip("sqlalchemy")
    tracking = pytest.importorskip("mlflow.tracking")
    cfg = config("mlflow", tmp_path, project="llama", run_name="first")
    write(cfg, 10, 20, 30)
    write(cfg, 30, 40, resumed=20, loss=1.0)
    client = tracking.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("llama").experiment_id])
    assert (run.info.run_name, run.info.status, run.data.params["backend"]) == ("first", "FINISHED", "fsdp")
    assert [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "loss")] == [
        (10, 2.5),
        (20, 2.5),
        (30, 2.5),
        (40, 1.0),
    ]
