"""Plays every case with what both ranks do together, samples, layers or experts, beside plain torch."""

from __future__ import annotations

import faulthandler
import logging
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import unishard
from dev.models import CASES
from dev.models.case import Batch, Case, micro_batch
from dev.models.data import LENGTH
from dev.models.figures import Record, beyond
from dev.models.oracle import Reference, reference
from dev.models.playing import LIMIT, deviations, record, worst
from dev.models.runs import UPDATES, WORLD, Run, config_of
from unishard.errors import ModelError
from unishard.failures.endings import is_lost_connection
from unishard.parallel.experts.finding import find_experts
from unishard.parallel.tensor.plan import rules_of
from unishard.testing.cells import BACKENDS

__all__ = [
    "DIFFERENT",
    "EQUAL",
    "FAILED",
    "METHODS",
    "RANDOM",
    "REFUSED",
    "JointRun",
    "outcome",
    "play_joint",
    "runs_with_experts",
    "runs_with_sequence",
    "runs_with_tensor",
]

METHODS = ("ulysses", "allgather")
_STRATEGIES = ("full_shard", "shard_grad_op")
EQUAL, REFUSED, RANDOM = "equal", "refused: ", "draws random numbers, so it is not compared"
DIFFERENT, FAILED = "differs: ", "fails: "
"""How an outcome begins."""


class JointRun(NamedTuple):
    """A run for a column of its own."""

    backend: str
    strategy: str
    column: str
    way: str
    """What its line of the cell begins with."""
    field: str
    """Of the config, an override."""
    readers: int
    """Ranks that read samples of their own."""

    def __str__(self) -> str:
        return f"{self.backend} {self.strategy} fp32, {self.column} by {self.way}"


def runs_with_sequence(number: int) -> list[JointRun]:
    """A run by each method; the engines take turns by the case's number."""
    return [
        JointRun(
            BACKENDS[(number + turn) % 2],
            "full_shard",
            "sequence",
            method,
            f"parallel.sequence={{size: {WORLD}, method: {method}}}",
            readers=1,
        )
        for turn, method in enumerate(METHODS)
    ]


def runs_with_experts(number: int) -> list[JointRun]:
    """A run on each engine, of a case that has experts."""
    has = _has(number, lambda model: find_experts(model, WORLD), "needs experts")
    return _on_both(number, "experts", f"parallel.expert={WORLD}", WORLD) if has else []


def runs_with_tensor(number: int) -> list[JointRun]:
    """A run on each engine, of a case that comes with a plan."""
    has = _has(number, lambda model: rules_of(model, "auto"), "comes without a plan")
    return _on_both(number, "tensor", f"parallel.tensor={WORLD}", 1) if has else []


def _has(number: int, find: Callable[[nn.Module], object], nothing: str) -> bool:
    """Whether something is found in a case, if only to be refused."""
    try:
        find([*CASES.values()][number].build())
    except ModelError as error:
        return nothing not in str(error)
    return True


def _on_both(number: int, column: str, field: str, readers: int) -> list[JointRun]:
    """A run on each engine; the strategies take turns by the case's number."""
    return [
        JointRun(backend, _STRATEGIES[(number + turn) % 2], column, backend, field, readers)
        for turn, backend in enumerate(BACKENDS)
    ]


def play_joint(todo: Mapping[str, Sequence[JointRun]], folder: str) -> None:
    """Play runs of cases and append what came of each to this rank's file in the case's folder. Collective.

    A refusal does not end the ranks; another error, and calls that differ, do, for they may leave them in any state.
    """
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    rank = int(os.environ["RANK"])
    for name, runs in todo.items():
        place = Path(folder, name)
        place.mkdir(exist_ok=True)
        case, expected, again = _references(CASES[name], runs[0].readers)
        draws = expected.losses != again.losses
        for run in runs:
            faulthandler.dump_traceback_later(LIMIT, exit=True)
            try:
                record(place, rank, run, _play(case, run, expected) | {"draws": draws})
            except Exception as error:
                record(place, rank, run, ending := _ending(error))
                if "error" in ending:
                    raise
            finally:
                faulthandler.cancel_dump_traceback_later()


def _ending(error: Exception) -> dict[str, Any]:
    """What a run ended with on this rank, and whether only the other one knows why."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, unishard.RankMismatchError):
        return {"error": text, "ours": True, "stops": True}
    if isinstance(error, unishard.UnishardError):
        return {"refused": text}
    lost = is_lost_connection(error)
    return {"error": text, "ours": lost, "lost": lost}


def _references(case: Case, readers: int) -> tuple[Case, Reference, Reference]:
    """A case at a length that no number of ranks divides, or as it is where its model takes no other; and plain torch
    of two seeds.
    """
    try:
        return _played_at(case, readers, LENGTH - 1)
    except (ValueError, RuntimeError):  # the model's own
        return _played_at(case, readers, LENGTH)


def _played_at(case: Case, readers: int, length: int) -> tuple[Case, Reference, Reference]:
    uneven = _uneven(case, length)
    first, second = (reference(uneven, "fp32", world=readers, seed=seed) for seed in range(2))
    return uneven, first, second


def _uneven(case: Case, length: int) -> Case:
    """A case of a length, and with more labels in some samples than in others."""

    def sample(index: int) -> Batch:
        made = {name: each[:length] if each.shape == (LENGTH,) else each for name, each in case.sample(index).items()}
        labels = made.get("labels")
        if isinstance(labels, Tensor) and labels.dim() == 1 and not labels.is_floating_point():
            labels = torch.cat([labels.new_full((1 + index % 3,), -100), labels[1 + index % 3 :]])
            return made | {"labels": labels}
        return made

    return replace(case, sample=sample)


def _play(case: Case, run: JointRun, expected: Reference) -> dict[str, Any]:
    losses, norms, reader = [], [], int(os.environ["RANK"]) % run.readers
    cfg = config_of(case, Run(run.backend, run.strategy, "fp32")).override(run.field)
    with unishard.prepare(case.build(), cfg) as engine:
        whole = [micro_batch(case, update, reader, run.readers) for update in range(UPDATES)]
        for update, part in enumerate(engine.batches(whole)):
            if case.before is not None:
                case.before(engine.module, update)
            loss = case.loss(engine, part)
            engine.backward(loss)
            losses.append(engine.mean(loss))
            norms.append(float(engine.step().grad_norm))  # type: ignore[arg-type]
        names = expected.parameters[UPDATES]
        found = {name: engine.weights.read(name) for name in names}
    return {
        "losses": deviations(losses, expected.losses[:UPDATES]),
        "norms": deviations(norms, expected.norms[:UPDATES]),
        **worst(found, names),
    }


def outcome(records: Sequence[Record]) -> str:
    """What came of a case's runs, a line for each way where they differ; of a refusal, how its message begins."""
    by_way = {record["run"].rpartition(" ")[2]: _outcome(record) for record in records}
    if len({*by_way.values()}) <= 1:
        return next(iter(by_way.values()), "")
    return "\n".join(f"{way}: {each}" for way, each in by_way.items())


def _outcome(record: Record) -> str:
    text = record.get("refused") or record.get("error")
    if text is not None:
        ours = "refused" in record or record["ours"]
        return (REFUSED if ours else FAILED) + re.split(r"\n|; ", text, maxsplit=1)[0]
    if record["draws"]:
        return RANDOM
    wrong = beyond(record)
    return EQUAL if wrong is None else DIFFERENT + wrong
