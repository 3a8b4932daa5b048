"""Engines that come and go in the same processes leave nothing behind; `make soak` has hundreds of them."""

from __future__ import annotations

import tempfile
import weakref
from collections import Counter

import pytest
from harness import BACKENDS, in_turn, play, values

from dev.soak.life import live
from dev.soak.plan import STRATEGIES, Segment, draw
from dev.soak.run import deviation
from dev.soak.usage import ROOM, WARM, Usage, grown, usage

pytestmark = pytest.mark.ranks


ENGINES = WARM
SEGMENT = Segment("full_shard", 1, evaluates=True, in_background=True, beyond=1, goes_back=True)
FEW = ROOM._replace(objects=20)


def come_and_go(backend, root):
    """Engines of one kind, for which one is enough to fill caches, and two to be sure."""
    lived = live(backend, root, (SEGMENT,) * ENGINES)
    return grown([lived.usages[0], *lived.usages], lived.more, FEW), lived.repeated, lived.differ, lived.losses


@pytest.fixture(scope="module")
def roots():
    with tempfile.TemporaryDirectory() as folder:
        yield {backend: f"{folder}/{backend}" for backend in BACKENDS}


@in_turn
def test_engines_leave_nothing_and_go_back_to_the_same_bits(backend, roots):
    run = come_and_go, (backend, roots[backend])
    for found, repeated, differ, losses in values(play((run,))[run]):
        assert found == []
        assert (repeated, differ) == (2 * ENGINES - 1, []), "by the engine that goes back, and by the next one"
        assert [*losses] == [*range(1, ENGINES + 1)]


def test_what_grows_is_told():
    before = Usage(memory=100.0, files=5, threads=3, shared=0, objects=1000, alive=0)
    for name, most in ROOM._asdict().items():
        after = before._replace(**{name: getattr(before, name) + most + 1})
        assert any(name in each for each in grown([before] * WARM + [after], Counter({"a.B": 7})))
        assert grown([before] * WARM + [before._replace(**{name: getattr(before, name) + most})], Counter()) == []
    held = Counter()
    assert usage([weakref.ref(held)]).alive == 1


def test_a_loss_that_is_another_one_or_missing_is_told():
    assert deviation({1: 2.0, 2: 1.0}, {1: 2.0, 2: 1.0 + 1e-3}) == (pytest.approx(1e-3, rel=0.01), 2)
    assert deviation({1: 2.0}, {1: 2.0, 2: 1.0}) == (float("inf"), 2)


def test_a_soak_has_as_many_updates_as_asked_and_every_number_of_ranks():
    lives = draw(2000, 8, 0)
    assert sum(segment.updates for life in lives for segment in life.segments) == 2000
    assert {life.world for life in lives} == {1, 2, 4}
    assert all({segment.strategy for segment in life.segments[:WARM]} == {*STRATEGIES} for life in lives)
    assert all(life.segments[0].in_background for life in lives)
    assert lives == draw(2000, 8, 0)
    assert lives != draw(2000, 8, 1)
