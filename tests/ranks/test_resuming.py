"""A run that moves to another engine, strategy or number of ranks goes on as the one that does not; `make matrix` tries
every pair."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import product

import pytest
from harness import STRATEGIES, config, own_share, play, train, values
from resumed_pairs import spanning_pairs

import unishard
from dev.resuming import WORLDS
from unishard.engine.state.parts.sharded_tensors import ShardedTensors
from unishard.engine.state.parts.training_state import TrainingState
from unishard.testing import resuming
from unishard.testing.cells import BACKENDS
from unishard.testing.models import llama
from unishard.testing.resuming import Pair

PLAIN = [*product(["plain"], ["fp32", "bf16"])]
PAIRS = spanning_pairs()
MOVED = [pair for pair in PAIRS if (pair.saved.feature, pair.saved.precision) in PLAIN and pair.saved != pair.resumed]
AS_ITSELF = [pair for pair in PAIRS if pair.saved == pair.resumed]


def few(moved: list[Pair]) -> list[Pair]:
    """From each number of ranks to each, the pair whose strategies, each of its engine, are seen the least so far."""
    chosen: list[Pair] = []
    seen: Counter[tuple[str, ...]] = Counter()
    for worlds in product(WORLDS, WORLDS):
        here = [pair for pair in moved if (pair.saved.world, pair.resumed.world) == worlds]
        chosen.append(min(here, key=lambda pair: sum(seen[kind] for kind in kinds(pair))))
        seen.update(kinds(chosen[-1]))
    return chosen


def kinds(pair: Pair) -> list[tuple[str, ...]]:
    """What saves and what resumes."""
    return [(role, run.backend, run.strategy) for role, run in zip(pair._fields, pair, strict=True)]


FEW = few(MOVED)
WITH_FEATURES = [pair for pair in PAIRS if pair not in AS_ITSELF and pair not in MOVED]
"""To the other engine, and back."""
ONE_WAY = [pair for number, pair in enumerate(WITH_FEATURES) if number % 4 in (0, 3)]
OTHERS = [*FEW, *ONE_WAY]
SAVED = {kind for pair in OTHERS for kind in kinds(pair)}
NEEDED = [pair for pair in AS_ITSELF if pair.saved.feature == "plain" and not set(kinds(pair)) <= SAVED]
DEEP = [pair for pair in PAIRS if pair not in OTHERS + NEEDED]
"""Further pairs of strategies, the way back, and runs that go on as themselves where they do as others too;
test_checkpoint.py has that bit by bit."""
BEFORE, AFTER = 1, 2
"""Optimizer steps before and after the checkpoint; `make matrix` takes 5 and 20, and test_data_position.py goes into
further epochs."""


@cache
def measured(deep: bool):
    return resuming.measure([pair for pair in PAIRS if deep or pair not in DEEP], AFTER, BEFORE)


@pytest.mark.parametrize(
    "pair", [pytest.param(pair, id=str(pair), marks=[pytest.mark.deep] * (pair in DEEP)) for pair in PAIRS]
)
def test_the_loss_curve_does_not_show_where_the_run_moved(pair: Pair, deep: bool):
    found = measured(deep)[pair]
    assert resuming.holds(pair, found), found


def test_every_strategy_of_every_engine_saves_and_resumes_at_every_number_of_ranks_and_goes_on_as_itself():
    kinds = list(product(BACKENDS, STRATEGIES))
    plain = [pair for pair in PAIRS if (pair.saved.feature, pair.saved.precision) in PLAIN]
    for runs in zip(*plain, strict=True):
        assert {(run.backend, run.strategy, run.world) for run in runs} >= {
            (*kind, world) for kind in kinds for world in WORLDS
        }
    assert {(one.world, other.world) for one, other in plain} == set(product(WORLDS, WORLDS))
    same = [pair.saved for pair in plain if pair.saved == pair.resumed]
    assert {(run.backend, run.strategy) for run in same} == set(kinds)
    assert {(run.strategy, run.world) for run in same} >= set(product(STRATEGIES, (2, 4)))
    assert {run.precision for run in same} == {"fp32", "bf16"}


def test_without_deep_every_strategy_of_every_engine_saves_and_resumes_and_every_number_of_ranks_follows_every_other():
    strategies = set(product(BACKENDS, STRATEGIES))
    played = [pair for pair in PAIRS if pair not in DEEP]
    for runs in zip(*played, strict=True):
        assert {(run.backend, run.strategy) for run in runs} >= strategies
    assert {(run.backend, run.strategy) for _, run in FEW} == strategies, "not only as themselves"
    assert {(one.world, other.world) for one, other in FEW} == set(product(WORLDS, WORLDS))
    assert {one.precision for one, _ in FEW} == {"fp32", "bf16"}
    assert {run.feature for pair in played for run in pair} == {*resuming.FEATURES}


# -- the measure can fail --------------------------------------------------------------------------


ADAMW = {"name": "adamw", "lr": 3e-3}


def without_moments(read):
    """A `read` that reads no optimizer state."""

    def read_model(part, source):
        matched, part._match = part._match, part._match._replace(optimizer={})
        read(part, source)
        part._match = matched

    return read_model


def without_schedule(resume):
    """A `resume` that begins the schedule anew."""

    def resume_at_0(part, source, group):
        schedule = source.manifest.schedule.model_copy(update={"updates": 0})
        manifest = source.manifest.model_copy(update={"schedule": schedule})
        return resume(part, source._replace(manifest=manifest), group)

    return resume_at_0


LOSSES = {
    "moments": (ShardedTensors, "read", without_moments),
    "schedule": (TrainingState, "resume", without_schedule),
    "nothing": (TrainingState, "resume", lambda resume: resume),
}


def forgetful(backend, what):
    """The relative deviation over ten updates of a resumed run that has lost something."""
    cfg = config(
        backend, "no_shard", optimizer=ADAMW, scheduler={"name": "cosine", "warmup_steps": 2, "total_steps": 14}
    )
    with unishard.prepare(llama(7), cfg) as engine:
        train(engine, own_share(4, "llama"))
        folder = engine.save(f"{what[1]}/{backend}")
        expected = [loss for loss, _ in train(engine, own_share(10, "llama"))]
    with unishard.prepare(llama(7), cfg) as engine, pytest.MonkeyPatch.context() as patch:
        part, method, without = LOSSES[what[0]]
        patch.setattr(part, method, without(getattr(part, method)))
        engine.load(folder)
        losses = [loss for loss, _ in train(engine, own_share(10, "llama"))]
    return max(abs(now - then) / then for now, then in zip(losses, expected, strict=True))


@pytest.mark.parametrize("backend", ["fsdp"])
def test_what_is_lost_shows(backend, tmp_path_factory):
    root = str(tmp_path_factory.mktemp("forgetful"))
    played = play(
        tuple((forgetful, (backend, (lost, f"{root}/{lost}"))) for lost in ("nothing", "moments", "schedule"))
    )
    nothing, moments, schedule = (values(outcomes)[0] for outcomes in played.values())
    assert nothing == 0
    assert moments > 1e-4
    assert schedule > 1e-4
