"""The conformance suite: compares every engine with plain torch.

The author of another engine needs one test, parametrized with `cells()`, that asserts `check("my_engine", cell) == []`.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch

import unishard
from unishard.config import Config
from unishard.contract.tolerances import TOLERANCES, Tolerance
from unishard.errors import UnishardError
from unishard.testing.cells import CLIP, STRATEGIES, Cell, config_of, micro_batches, windows
from unishard.testing.features import AREAS, FEATURES, area_of
from unishard.testing.known_gaps import GAPS, KnownGap
from unishard.testing.models import MODELS
from unishard.testing.oracle import Curve
from unishard.testing.ranks import RankFailure, run_ranks

__all__ = [
    "GAPS",
    "TOLERANCES",
    "Cell",
    "Deviation",
    "KnownGap",
    "Refusal",
    "Tolerance",
    "cells",
    "check",
    "compare",
    "config",
    "expected",
    "measure",
    "plain_cells",
    "run_cell",
    "suite",
    "tolerance",
]


class Refusal(NamedTuple):
    """The result of an engine that does not support a cell."""

    reason: str


def cells() -> list[Cell]:
    """All cells: of the plain loop, then of every feature."""
    return plain_cells() + [
        cell for feature in FEATURES.values() if feature.name != "plain" for cell in feature.cells()
    ]


def suite() -> list[Cell]:
    """The subset of cells that a test suite runs, with their first optimizer steps; `make parity` runs all of
    `cells()`.

    For each area: every strategy of its features, with their models in turn, in the first dtype and at 2 ranks. Each
    feature has one strategy; the first has those that are left, and its last strategy in every dtype. For the plain
    loop at 2 ranks: long windows with clipping and windows of one micro-batch without, in every combination of strategy
    and dtype, each with one or both models; all of its cells at 1 rank; at 4 ranks one of each strategy, with both
    models, dtypes and windows.
    """
    return [replace(cell, steps=FEATURES[cell.feature].steps_in_suite) for cell in cells() if _in_suite(cell)]


def _in_suite(cell: Cell) -> bool:
    feature = FEATURES[cell.feature]
    if cell.feature == "plain":
        return _in_plain_suite(cell)
    if 2 in feature.worlds and cell.world != 2:
        return False
    models, area = list(feature.models), area_of(cell.feature)
    if cell.model != models[feature.strategies[::-1].index(cell.strategy) % len(models)]:
        return False
    if feature is AREAS[area][0] and cell.strategy == feature.strategies[-1]:
        return True
    return cell.precision == feature.precisions[0] and cell.strategy in _strategies_in_suite(area)[cell.feature]


@cache
def _strategies_in_suite(area: str) -> dict[str, set[str]]:
    """The strategies of each feature of an area: the one that the features before use least. The first feature also has
    all strategies that no other feature uses.
    """
    chosen: list[str] = []
    for feature in AREAS[area]:
        chosen.append(min(feature.strategies, key=chosen.count))
    strategies = {feature.name: {strategy} for feature, strategy in zip(AREAS[area], chosen, strict=True)}
    first = AREAS[area][0]
    strategies[first.name] |= set(first.strategies) - set(chosen)
    return strategies


def _in_plain_suite(cell: Cell) -> bool:
    long_window, clipped = cell.accumulation > 1, cell.clip is not None
    if cell.world == 4:
        return long_window is clipped is (cell.strategy in STRATEGIES[2:])
    return cell.world == 1 or (
        long_window is clipped and (cell.model == "mlp" or long_window is (cell.precision == "bf16"))
    )


def plain_cells() -> list[Cell]:
    """All combinations at 2 ranks; at 1 and 4 ranks a subset that combines every value with each strategy or each world
    size.
    """
    full = [Cell(*values, world=2) for values in product(MODELS, STRATEGIES, (1, 3), (CLIP, None), ("fp32", "bf16"))]
    spanning = []
    for world, (index, strategy) in product((1, 4), enumerate(STRATEGIES)):
        first, second = ("fp32", "bf16") if index % 2 else ("bf16", "fp32")
        spanning += [
            Cell("mlp", strategy, 3, CLIP, first, world),
            Cell("llama", strategy, 1 + index // 2 * 2, None, second, world),
        ]
    return full + spanning


def tolerance(backend: str, cell: Cell) -> Tolerance:
    """The tolerance of an engine in a cell: the bounds of its feature, unless that or the suite declares a gap."""
    feature = FEATURES[cell.feature]
    for gap in (*feature.gaps, *GAPS):
        if (gap.backend, gap.model, gap.strategy, gap.precision) == (
            backend,
            cell.model,
            cell.strategy,
            cell.precision,
        ):
            return gap.tolerance
    return feature.tolerances[cell.precision]


def config(backend: str, cell: Cell) -> Config:
    """The config of a cell, as a user would write it."""
    return config_of(backend, cell, FEATURES[cell.feature].sections)


def run_cell(backend: str, cell: Cell) -> Curve:
    """Train the cell through `unishard.prepare`. Collective: call it on `cell.world` ranks."""
    feature = FEATURES[cell.feature]
    model = feature.models[cell.model]
    data = micro_batches(model, cell, unishard.Topology.from_environment().rank)
    with feature.prepare(model.build(), config(backend, cell)) as engine:
        return feature.loop(engine, data, cell)


class Deviation(NamedTuple):
    """Largest relative differences of two curves."""

    first_losses: float
    losses: float
    first_norm: float
    norms: float
    lrs: float


def compare(curve: Curve, reference: Curve) -> Deviation:
    """The deviation of a curve from the reference; infinite if the lengths differ or a value is not finite."""

    def worst(one: Sequence[float], other: Sequence[float]) -> float:
        if len(one) != len(other):
            return math.inf
        differences = [abs(a - b) / max(abs(b), 1e-30) for a, b in zip(one, other, strict=True)]
        return max((d if math.isfinite(d) else math.inf for d in differences), default=math.inf)

    return Deviation(
        worst(curve.losses[:3], reference.losses[:3]),
        worst(curve.losses, reference.losses),
        worst(curve.norms[:1], reference.norms[:1]),
        worst(curve.norms, reference.norms),
        worst(curve.lrs, reference.lrs),
    )


def check(backend: str, cell: Cell, together: Collection[Cell] = ()) -> list[str]:
    """The deviations of an engine in a cell, one line each; empty if it conforms. `together` as in `measure`."""
    answer, refused = measure(backend, cell, together), FEATURES[cell.feature].refuses(backend, cell)
    if isinstance(answer, Refusal):
        return [] if refused else [f"refused: {answer.reason}"]
    if refused:
        return ["was not refused, though this engine does not support it"]
    deviation, bound = compare(answer, expected(cell, together)), asdict(tolerance(backend, cell)) | {"lrs": 1e-12}
    return [
        f"{name.replace('_', ' ')} differ from plain torch by {value:.2g} (relative), allowed: {bound[name]:g}"
        for name, value in deviation._asdict().items()
        if not value <= bound[name]
    ]


def measure(backend: str, cell: Cell, together: Collection[Cell] = ()) -> Curve | Refusal:
    """The engine's curve, or its refusal. Cells of a group run in the same processes, once per session.

    Args:
        backend: The backend.
        cell: The settings.
        together: Cells that form a group with it, and at other worlds another one, which takes fewer processes than the
            groups by area that there are without.

    Raises:
        AssertionError: The engine failed in this cell, or its ranks report different curves.
    """
    measured = _measure_group(backend, _members(cell, together))
    if isinstance(measured, RankFailure):
        raise measured
    answers: list[Curve | Refusal | str] = [answers[cell] for answers in measured]
    for rank, answer in enumerate(answers):
        if isinstance(answer, str):
            raise AssertionError(f"{backend}, {cell}: rank {rank} failed:\n{answer}")
        if repr(answer) != repr(answers[0]):  # NaN is not equal to itself
            raise AssertionError(f"{backend}, {cell}: rank {rank} reports {answer}, rank 0 {answers[0]}")
    first = answers[0]
    assert not isinstance(first, str)
    return first


def _group_of(cell: Cell) -> str:
    """The group of a cell, whose cells share processes: an area, or for the plain loop a model and a precision."""
    group = f"{cell.model} {cell.precision}" if cell.feature == "plain" else area_of(cell.feature)
    return f"{group}, suite" if cell in _suite() else group


@cache
def _suite() -> frozenset[Cell]:
    return frozenset(suite())


def _members(cell: Cell, together: Collection[Cell]) -> tuple[Cell, ...]:
    """The cells that share processes with a cell."""
    if together:
        return tuple(member for member in together if member.world == cell.world)
    return _members_by_area(_group_of(cell), cell.world)


@cache
def _members_by_area(group: str, world: int) -> tuple[Cell, ...]:
    every = dict.fromkeys((*suite(), *cells()))
    return tuple(cell for cell in every if (_group_of(cell), cell.world) == (group, world))


@cache
def _measure_group(backend: str, members: tuple[Cell, ...]) -> list[dict[Cell, Any]] | RankFailure:
    try:
        return run_ranks(members[0].world, _run_group, backend, members, timeout=60.0 + 30.0 * len(members))
    except RankFailure as failure:  # kept, else each of its cells would run all of them again
        return failure


def _run_group(backend: str, group: Sequence[Cell]) -> dict[Cell, Any]:
    """Curves by cell, or why there is none: an error on all ranks does not affect the next cells."""
    curves: dict[Cell, Any] = {}
    for cell in group:
        try:
            curves[cell] = run_cell(backend, cell)
        except UnishardError as error:
            curves[cell] = Refusal(f"{type(error).__name__}: {error}")
        except Exception:  # any error is this cell's result
            curves[cell] = traceback.format_exc()
    return curves


def expected(cell: Cell, together: Collection[Cell] = ()) -> Curve:
    """The oracle's curve. `together` as in `measure`."""
    return _oracle_group(_members(cell, together))[_with_first_strategy(cell)]


@cache
def _oracle_group(group: tuple[Cell, ...]) -> dict[Cell, Curve]:
    members = {_with_first_strategy(cell) for cell in group}
    on_cpu = (
        {"CUDA_VISIBLE_DEVICES": ""} if torch.cuda.device_count() < group[0].world else None
    )  # as the engines' ranks
    curves: dict[Cell, Curve] = run_ranks(
        1, _run_oracle, sorted(members, key=str), timeout=60.0 + 30.0 * len(members), env=on_cpu
    )[0]
    return curves


def _with_first_strategy(cell: Cell) -> Cell:
    """The cell with its feature's first strategy, since plain torch does not depend on the strategy."""
    return replace(cell, strategy=FEATURES[cell.feature].strategies[0])


def _run_oracle(group: list[Cell]) -> dict[Cell, Curve]:
    """Run the oracle on the device that the engines train on, because devices round differently."""
    curves, device = {}, "cuda" if torch.cuda.is_available() else "cpu"
    for cell in group:
        feature = FEATURES[cell.feature]
        model = feature.models[cell.model]
        curves[cell] = feature.reference(model.build().to(device), windows(model, cell), config("fsdp", cell), cell)
    return curves
