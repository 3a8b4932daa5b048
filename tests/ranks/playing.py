"""Plays many scenarios in the same ranks, so that a test costs its own work and not a start."""

from __future__ import annotations

import contextlib
import logging
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import unishard
from unishard.config import Config
from unishard.testing import RankFailure, oracle, run_ranks
from unishard.testing.cells import BACKENDS
from unishard.testing.models import MODELS, batch

STRATEGIES = ("no_shard", "shard_optimizer", "shard_grad_op", "full_shard")
PRECISIONS = ("fp32", "bf16")
SPANNING = tuple(
    (backend, strategy, PRECISIONS[(first + number) % 2])
    for first, backend in enumerate(BACKENDS)
    for number, strategy in enumerate(STRATEGIES)
)
"""Every strategy of each backend in one precision, and in the other one on the other backend: every pair of two of the
three."""
MICRO_BATCH = 2

Scenario = Callable[..., Any]


class Outcome(NamedTuple):
    """What a scenario returned on one rank, or what it raised."""

    value: Any
    error: tuple[str, str] | None


def play(
    scenarios: tuple[tuple[Scenario, tuple[Any, ...]], ...], world: int = 2
) -> dict[tuple[Scenario, tuple[Any, ...]], list[Outcome]]:
    """Outcomes by rank of each (function, arguments). The same scenarios are played once."""
    played = _played(scenarios, world)
    if isinstance(played, RankFailure):
        raise played
    return {scenario: [outcomes[index] for outcomes in played] for index, scenario in enumerate(scenarios)}


@cache
def _played(scenarios: tuple[tuple[Scenario, tuple[Any, ...]], ...], world: int) -> list[list[Outcome]] | RankFailure:
    try:
        return run_ranks(world, _play, scenarios, timeout=120 + 5 * len(scenarios))
    except RankFailure as failure:
        return failure


def _play(scenarios: tuple[tuple[Scenario, tuple[Any, ...]], ...]) -> list[Outcome]:
    outcomes = []
    for function, arguments in scenarios:
        try:
            outcomes.append(Outcome(function(*arguments), None))
        except Exception as error:
            outcomes.append(Outcome(None, (type(error).__name__, str(error))))
    return outcomes


def values(outcomes: list[Outcome]) -> list[Any]:
    """What every rank returned; fails with what one raised."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"rank {rank} raised {outcome.error[0]}: {outcome.error[1]}"
    return [outcome.value for outcome in outcomes]


def on_ranks(scenario: Scenario, *arguments: Any, world: int = 2) -> list[Any]:
    """What every rank returned of a scenario that is played alone."""
    return values(play(((scenario, arguments),), world)[scenario, arguments])


def raised(scenario: Scenario, *arguments: Any, world: int = 2) -> str:
    """`Type: message` that every rank raised in a scenario that is played alone."""
    return error(play(((scenario, arguments),), world)[scenario, arguments])


def in_turn(test: Callable[..., None]) -> Any:
    """Parametrize a test of what no engine decides by the backend: it takes one of them, `--deep` the other too."""
    first = zlib.crc32(test.__name__.encode()) % len(BACKENDS)
    marks = [[], [pytest.mark.deep]]
    chosen = [pytest.param(each, marks=marks[number != first]) for number, each in enumerate(BACKENDS)]
    return pytest.mark.parametrize("backend", chosen)(test)


def error(outcomes: list[Outcome]) -> str:
    """`Type: message` that every rank raised."""
    raised = [outcome.error for outcome in outcomes]
    assert None not in raised, f"not every rank raised: {raised}"
    assert len(set(raised)) == 1, f"the ranks raised different errors: {raised}"
    return ": ".join(raised[0])


def refused(call: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    """What a call raised of unishard's errors, or `nothing`."""
    try:
        call(*arguments, **named)
    except unishard.UnishardError as problem:
        return f"{type(problem).__name__}: {problem}"
    return "nothing"


@contextlib.contextmanager
def heard(logger: str = "unishard", level: int = logging.NOTSET) -> Iterator[list[str]]:
    """What a logger says in the block."""
    lines: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger(logger).removeHandler(handler)


def run_script(path: str | Path, *words: str) -> None:
    """Be a script, in this process: importing costs more than the rest."""
    sys.argv = [str(path), *words]
    exec(
        compile(Path(path).read_text(encoding="utf-8"), str(path), "exec"),
        {"__name__": "__main__", "__file__": str(path)},
    )


def config(backend: str, strategy: str = "full_shard", **sections: Any) -> Config:
    """A config for the MLP under SGD with momentum, which shows what AdamW hides; a section that is None is left out.

    Without the desync check, which changes no figure and takes a quarter of the time of so short a run: see `checked`.
    """
    sections["training"] = {"micro_batch_size": MICRO_BATCH} | sections.get("training", {})
    sections.setdefault("communication", {"desync_check": False})
    sections.setdefault("optimizer", {"name": "sgd", "lr": 0.1, "momentum": 0.9})
    given = {name: section for name, section in sections.items() if section is not None}
    return Config.model_validate({"backend": backend, "sharding": strategy, **given})


def checked(backend: str, strategy: str = "full_shard", **sections: Any) -> Config:
    """`config` with the desync check, as a user has it."""
    return config(backend, strategy, **({"communication": {}} | sections))


def prepare(cfg: Config, model: str = "mlp") -> Any:
    """The tiny model, prepared."""
    return unishard.prepare(MODELS[model].build(), cfg)


def share(count: int, *, rank: int, world: int, model: str = "mlp") -> list[dict[str, Any]]:
    """A rank's first `count` micro-batches."""
    return [batch(model, (turn * world + rank) * MICRO_BATCH, MICRO_BATCH) for turn in range(count)]


def my_rank() -> int:
    """This process among the ranks."""
    return unishard.Topology.from_environment().rank


def own_share(count: int, model: str = "mlp") -> list[dict[str, Any]]:
    """This rank's first `count` micro-batches."""
    topology = unishard.Topology.from_environment()
    return share(count, rank=topology.rank, world=topology.world_size, model=model)


def everyones(start: int, stop: int, *, world: int, model: str = "mlp") -> list[dict[str, Any]]:
    """Micro-batches `start` to `stop - 1` of all ranks: one accumulation window for the oracle."""
    shares = [share(stop, rank=rank, world=world, model=model) for rank in range(world)]
    return [shares[rank][turn] for turn in range(start, stop) for rank in range(world)]


def train(engine: Any, micro_batches: list[dict[str, Any]], **step: Any) -> list[tuple[float, Any]]:
    """Mean loss over the ranks and `Step` of each micro-batch."""
    done = []
    for micro_batch in engine.batches(micro_batches):
        loss = engine(**micro_batch).loss
        engine.backward(loss)
        done.append((engine.mean(loss), engine.step(**step)))
    return done


def curve(done: list[tuple[float, Any]]) -> oracle.Curve:
    """Of single micro-batches, the updates: mean loss, norm, lr."""
    losses, norms, lrs, window = [], [], [], []
    for loss, step in done:
        window.append(loss)
        if step.updated:
            losses.append(sum(window) / len(window))
            norms.append(step.grad_norm)
            lrs.append(step.lr)
        if step.updated or step.skipped:
            window = []
    return oracle.Curve(tuple(losses), tuple(norms), tuple(lrs))
