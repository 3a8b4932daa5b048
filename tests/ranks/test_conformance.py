"""Every backend x strategy x accumulation x clipping x precision against plain torch: the shipped suite, run on our own
engines."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from unishard.testing import conformance
from unishard.testing.cells import BACKENDS, CLIP, STEPS, STRATEGIES
from unishard.testing.conformance import Curve
from unishard.testing.features import AREAS, FEATURES, area_of

PLAIN = [cell for cell in conformance.suite() if cell.feature == "plain"]
QUICK = [cell for cell in PLAIN if (cell.model, cell.clip, cell.precision, cell.world) == ("mlp", CLIP, "fp32", 2)]
"""What `make quick` runs of the suite."""
HYBRIDS = [each for each in FEATURES if "hybrid_" in each or each.endswith("_hybrid")]


COMBINED = [
    cell
    for cell in conformance.suite()
    if cell.feature != "plain" and (area_of(cell.feature) in ("combinations", "sequence") or cell.feature in HYBRIDS)
]
"""Of features that other cells have alone, on both engines, and of what the engines do not know of."""
REPEATED = [
    cell
    for cell in PLAIN
    if (cell.world, cell.model) != (2, "mlp") or (cell.precision == "fp32") != (cell.clip is not None)
]
"""The plain loop of another model, at another number of ranks, or with the other windows."""
OF_THE_CORE = [
    cell
    for cell in conformance.suite()
    if area_of(cell.feature)
    in ("accumulation", "access", "optimizers", "eight_bit", "lora", "evaluation", "models", "recomputation", "units")
]
LARGE = [
    cell
    for cell in conformance.suite()
    if cell not in COMBINED
    and area_of(cell.feature) in ("offload", "precision", "sharding")
    and (cell.world == 4 or cell.steps > 3)
]
"""On 4 ranks, or with many updates."""
"""What the core does around an engine; what an engine does for it has tests of its own, on both."""


IN_TURN = (
    *([cell for cell in COMBINED if area_of(cell.feature) == area] for area in AREAS),
    *(REPEATED, OF_THE_CORE, LARGE),
)
"""Cells of which each is measured on one engine, but for one that has no other like it."""


ELSEWHERE = ("recurrences_by_heads", "recurrences_by_states", "recurrences_by_states_hybrid")
"""Features that test_hybrid_sequences.py compares with plain torch on other models, in the same ways."""


def _param(backend, cell):
    alike = next((cells for cells in IN_TURN if cell in cells), [cell])
    turn = alike.index(cell)
    in_turn = cell.feature not in ELSEWHERE and (len(alike) == 1 or BACKENDS[(turn + turn // 4) % 2] == backend)
    marks = [*[pytest.mark.quick] * (cell in QUICK), *[pytest.mark.deep] * (not in_turn)]
    return pytest.param(backend, cell, id=f"{backend}-{cell}", marks=marks)


@pytest.fixture(scope="module")
def together(request):
    """The cells that this run measures, by engine: they share processes."""
    chosen = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    given = [each.params for each in chosen if each is not None and "cell" in each.params]
    return {backend: [each["cell"] for each in given if each["backend"] == backend] for backend in BACKENDS}


@pytest.mark.parametrize(
    ("backend", "cell"), [_param(backend, cell) for backend in BACKENDS for cell in conformance.suite()]
)
def test_losses_norms_and_rates_are_those_of_plain_torch(backend, cell, together, record_property):
    answer = conformance.measure(backend, cell, together[backend])
    if not isinstance(answer, conformance.Refusal):
        reference = conformance.expected(cell, together[backend])
        record_property("deviation", conformance.compare(answer, reference)._asdict())
        record_property(
            "declared gap", conformance.tolerance(backend, cell) is not conformance.TOLERANCES[cell.precision]
        )
    assert conformance.check(backend, cell, together[backend]) == []


def test_either_engine_has_all_that_cells_combine_and_repeat():
    """Without `--deep` such a cell is measured on one engine."""
    for backend in BACKENDS:
        here = [each for each in COMBINED if not _param(backend, each).marks]
        assert {area_of(cell.feature) for cell in here} == {area_of(cell.feature) for cell in COMBINED}
        assert {cell.precision for cell in here} == {cell.precision for cell in COMBINED}
        assert {cell.strategy for cell in here} >= {"no_shard", "full_shard", "hybrid_shard"}
        again = [each for each in REPEATED if not _param(backend, each).marks]
        assert {(cell.world, cell.model) for cell in again} == {(cell.world, cell.model) for cell in REPEATED}
        core = [each for each in OF_THE_CORE if not _param(backend, each).marks]
        assert {(area_of(cell.feature), cell.precision) for cell in core} >= {
            (area_of(cell.feature), "fp32") for cell in OF_THE_CORE
        }
        assert {cell.strategy for cell in core} >= set(STRATEGIES)
        assert any(cell.feature == "hybrid" and not _param(backend, cell).marks for cell in LARGE)
        assert any(cell.feature == "fp16" and not _param(backend, cell).marks for cell in LARGE)


def test_make_quick_runs_every_strategy():
    assert {cell.strategy for cell in QUICK} == set(STRATEGIES)


def test_a_shorter_cell_is_the_beginning_of_the_whole_one():
    for short in PLAIN[:1]:
        lengths = replace(short, steps=STEPS), short
        whole, begun = (conformance.expected(each, lengths) for each in lengths)
        assert [field[: short.steps] for field in whole] == list(begun)


@pytest.mark.parametrize("area", AREAS)
def test_the_suite_has_every_feature_and_model_of_an_area_and_every_strategy_and_dtype_of_its_first(area):
    here = [cell for cell in conformance.suite() if area_of(cell.feature) == area]
    first = AREAS[area][0]
    assert {cell.feature for cell in here} == {feature.name for feature in AREAS[area]}
    assert {cell.strategy for cell in here} >= set(first.strategies)
    assert {cell.model for cell in here} == {model for feature in AREAS[area] for model in feature.models}
    assert {cell.precision for cell in here if cell.feature == first.name} == set(first.precisions)


def test_the_suite_has_every_strategy_model_dtype_and_window_of_the_plain_loop_at_every_world():
    for world in (1, 2, 4):
        here = [cell for cell in conformance.suite() if (cell.feature, cell.world) == ("plain", world)]
        for field, values in {"strategy": 4, "precision": 2, "model": 2, "accumulation": 2, "clip": 2}.items():
            assert len({getattr(cell, field) for cell in here}) == values


@pytest.mark.parametrize("world", [1, 4])
def test_the_subset_at_other_worlds_has_every_strategy_with_either_precision_model_accumulation_and_clipping(world):
    subset = [cell for cell in conformance.plain_cells() if cell.world == world]
    for field, values in {"strategy": 4, "precision": 2, "model": 2, "accumulation": 2, "clip": 2}.items():
        assert len({getattr(cell, field) for cell in subset}) == values
    assert {(cell.strategy, cell.precision) for cell in subset} == {
        (cell.strategy, cell.precision) for cell in conformance.plain_cells() if cell.world == 2
    }


def test_clipping_always_acts_where_a_cell_asks_for_it():
    clipped = [cell for cell in PLAIN if cell.clip]
    assert clipped
    assert all(min(conformance.expected(cell, clipped).norms) > cell.clip for cell in clipped)


@pytest.mark.parametrize(
    ("devices", "env"), [(0, {"CUDA_VISIBLE_DEVICES": ""}), (1, {"CUDA_VISIBLE_DEVICES": ""}), (2, None)]
)
def test_the_reference_trains_on_the_cpu_where_the_ranks_do(devices, env, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(
        conformance, "run_ranks", lambda *given, **named: asked.append((given[0], named["env"])) or [{}]
    )
    conformance._oracle_group.__wrapped__((QUICK[0],))
    assert asked == [(1, env)]


def test_every_declared_gap_is_still_there():
    """Else it must go from the table: upstream has closed it."""
    for gap in conformance.GAPS:
        common = conformance.TOLERANCES[gap.precision].first_losses
        inside = [cell for cell in PLAIN if (cell.model, cell.strategy, cell.precision) == gap[1:4] and cell.world == 2]
        assert inside
        found = [
            conformance.compare(conformance.measure(gap.backend, cell), conformance.expected(cell)).first_losses
            for cell in inside
        ]
        assert max(found) > common, found
        assert gap.link.startswith("https://")


CURVE = Curve((2.0, 1.5, 1.0, 0.5), (3.0, 2.0, 2.0, 2.0), (0.1, 0.1, 0.1, 0.1))


@pytest.mark.parametrize(
    ("curve", "field", "value"),
    [
        (CURVE._replace(losses=(2.0, 1.5, 1.1, 0.5)), "first_losses", 0.1),
        (CURVE._replace(losses=(2.0, 1.5, 1.0, 0.6)), "losses", 0.2),
        (CURVE._replace(norms=(3.3, 2.0, 2.0, 2.0)), "first_norm", 0.1),
        (CURVE._replace(norms=(3.0, 2.0, 2.0, 2.2)), "norms", 0.1),
        (CURVE._replace(lrs=(0.1, 0.1, 0.1, 0.2)), "lrs", 1.0),
        (CURVE._replace(losses=(2.0, 1.5, 1.0)), "losses", math.inf),
        (CURVE._replace(norms=(math.nan, 2.0, 2.0, 2.0)), "first_norm", math.inf),
    ],
)
def test_a_curve_that_deviates_is_seen(curve, field, value):
    assert getattr(conformance.compare(curve, CURVE), field) == pytest.approx(value)
    assert conformance.compare(CURVE, CURVE) == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_check_says_what_is_wrong_when_an_engine_trains_something_else(backend, monkeypatch):
    curve = conformance.expected(QUICK[0], QUICK[:1])
    wrong = curve._replace(
        losses=tuple(loss * 1.01 for loss in curve.losses), norms=(*curve.norms[:-1], curve.norms[-1] * 2)
    )
    monkeypatch.setattr(conformance, "measure", lambda *_: wrong)
    assert [line.split(" differ")[0] for line in conformance.check(backend, QUICK[0], QUICK[:1])] == [
        "first losses",
        "losses",
        "norms",
    ]
