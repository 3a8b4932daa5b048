"""Plays the runs of a case on one rank, and compares each with plain torch."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import unishard
from dev.models import CASES
from dev.models.case import Case, micro_batch
from dev.models.exporting import difference
from dev.models.oracle import Reference, reference
from dev.models.runs import MORE, PRECISIONS, UPDATES, WORLD, Run, config_of

__all__ = ["LIMIT", "deviations", "play", "record", "worst"]

LIMIT = 60.0
"""Seconds after which a run hangs: its ranks end, and the other runs are played by new ones."""


def play(todo: Mapping[str, Sequence[Run]], folder: str) -> None:
    """Play runs of cases and append what came of each to this rank's file in the case's folder. Collective.

    Ends with the first error, for it may leave an engine or the process group in any state.
    """
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    for name, runs in todo.items():
        place = Path(folder, name)
        place.mkdir(exist_ok=True)
        _play_all(CASES[name], runs, int(os.environ["RANK"]), place)


def _play_all(case: Case, runs: Sequence[Run], rank: int, place: Path) -> None:
    _prepare_references(case, runs, rank, place)
    for run in runs:
        expected = _reference(place, run.precision)
        if isinstance(expected, str):
            record(place, rank, run, {"plain": expected})
            continue
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        begin = time.process_time()
        try:
            figures = _play(case, run, expected, rank, place)
        except Exception as error:
            record(
                place,
                rank,
                run,
                {"error": f"{type(error).__name__}: {error}", "ours": isinstance(error, unishard.UnishardError)},
            )
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()
        record(place, rank, run, figures | {"seconds": round(time.process_time() - begin, 2)})


def record(place: Path, rank: int, run: Any, found: dict[str, Any]) -> None:
    """Append what came of a run to a rank's file."""
    with (place / f"rank{rank}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"run": str(run), **found}) + "\n")


def _prepare_references(case: Case, runs: Sequence[Run], rank: int, place: Path) -> None:
    """Each rank plays plain torch in one precision, for both."""
    precision = PRECISIONS[rank]
    if precision in {run.precision for run in runs} and not _path(place, precision).exists():
        answer: Reference | str
        try:
            answer = reference(case, precision)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        torch.save(answer, place / f"{precision}.unfinished")
        (place / f"{precision}.unfinished").rename(_path(place, precision))


def _path(place: Path, precision: str) -> Path:
    return place / f"{precision}.pt"


def _reference(place: Path, precision: str) -> Reference | str:
    deadline = time.monotonic() + LIMIT
    while not _path(place, precision).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no figures of plain torch in {precision}")
        time.sleep(0.01)
    answer: Reference | str = torch.load(_path(place, precision), weights_only=False)
    return answer


def _play(case: Case, run: Run, expected: Reference, rank: int, place: Path) -> dict[str, Any]:
    model = case.build()
    if run.resumes:
        with torch.no_grad():
            for parameter in model.parameters():  # a checkpoint that is not loaded is seen
                parameter.add_(parameter.new_ones(()))
    with unishard.prepare(model, config_of(case, run)) as engine:
        if run.resumes:
            engine.load(place / f"{run.resumes}-{run.precision}", verify="bits")
        first, last = (UPDATES, UPDATES + MORE) if run.resumes else (0, UPDATES)
        losses, norms = _train(engine, case, rank, range(first, last))
        names = expected.parameters[last]
        parameters = {name: engine.weights.read(name) for name in names}
        figures: dict[str, Any] = {
            "losses": deviations(losses, expected.losses[first:last]),
            "norms": deviations(norms, expected.norms[first:last]),
            **worst(parameters, names),
        }
        if run.saves:
            engine.save(place / f"{run.backend}-{run.precision}")
        if run.exports:
            engine.export(place / f"{run.backend}-exported")
            engine.eval()  # merges the buffers in the model, as the export has them
            if rank == 0:
                figures["export"] = difference(
                    case, parameters, dict(engine.module.named_buffers()), place / f"{run.backend}-exported"
                )
    return figures


def _train(engine: unishard.Engine, case: Case, rank: int, updates: range) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for update in updates:
        if case.before is not None:
            case.before(engine.module, update)
        loss = case.loss(engine, micro_batch(case, update, rank, WORLD))
        engine.backward(loss)
        losses.append(engine.mean(loss))
        step = engine.step()
        assert step.updated, f"update {update} is not made: {step}"
        norms.append(float(step.grad_norm))  # type: ignore[arg-type]
    return losses, norms


def deviations(found: list[float], right: list[float]) -> list[float]:
    """Of each figure, relative."""
    return [abs(one - other) / max(abs(other), 1e-12) for one, other in zip(found, right, strict=True)]


def worst(found: dict[str, Tensor], right: dict[str, Tensor]) -> dict[str, Any]:
    """The largest difference of a parameter, and its name."""
    largest = {
        name: _largest(found[name].to(parameter.dtype) - parameter)
        for name, parameter in right.items()
        if parameter.numel()
    }
    name = max(largest, key=lambda each: largest[each])
    return {"parameters": largest[name], "worst": name}


def _largest(difference: Tensor) -> float:
    value = difference.abs().max().item()
    return float("inf") if value != value else float(value)
