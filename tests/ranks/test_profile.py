"""What `profile` writes: a trace that holds the chosen steps, the same on every engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import config, in_turn, on_ranks, own_share, prepare, train


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return str(tmp_path_factory.mktemp("traces"))


def traced(backend, root):
    """Steps 2 and 3 share a trace, 5 has one of its own; step 2 is discarded once."""
    sections = {"training": {"gradient_accumulation_steps": 2}}
    profile = {"steps": [2, 3, 5], "dir": f"{root}/{backend}", "memory": True, "ranks": "all"}
    with prepare(config(backend, profile=profile, **sections)) as engine:
        logged = []
        for turn, micro_batch in enumerate(engine.batches(own_share(12))):
            loss = engine(**micro_batch).loss
            if turn == 2:
                engine.discard()
                continue
            engine.backward(loss)
            logged.append((loss.item(), engine.step()))
    return logged


def untraced(backend, root):
    profile = {"steps": [9], "dir": f"{root}/{backend}-none"}
    with prepare(config(backend, profile=profile)) as engine:
        train(engine, own_share(2))


def ended(backend, root):
    """A run that ends inside a chosen step, after one that is written; only rank 0 is traced."""
    profile = {"steps": [1, 3, 4], "dir": f"{root}/{backend}-ended", "shapes": True}
    with prepare(config(backend, profile=profile, training={"gradient_accumulation_steps": 2})) as engine:
        train(engine, own_share(6))
        engine.backward(engine(**own_share(1)[0]).loss)


def steps_in(path):
    events = json.loads(path.read_text())["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert any(name.startswith("aten::") for name in names)
    return sorted({name for name in names if name.startswith("ProfilerStep#")})


@in_turn
def test_a_trace_holds_the_chosen_steps(backend, root):
    on_ranks(traced, backend, root)
    folder = Path(root, backend)
    files = [
        f"steps-{steps}.rank{rank}.{kind}.json"
        for steps in ("2-3", "5-5")
        for rank in (0, 1)
        for kind in ("memory", "trace")
    ]
    assert sorted(path.name for path in folder.iterdir()) == files
    for rank in (0, 1):
        assert steps_in(folder / f"steps-2-3.rank{rank}.trace.json") == ["ProfilerStep#2", "ProfilerStep#3"]
        assert steps_in(folder / f"steps-5-5.rank{rank}.trace.json") == ["ProfilerStep#5"]
        points = json.loads((folder / f"steps-2-3.rank{rank}.memory.json").read_text())["points"]
        assert points == sorted(points)
        assert max(size for _, size in points) > 0


@in_turn
def test_steps_that_do_not_come_leave_no_file(backend, root):
    on_ranks(untraced, backend, root)
    assert not Path(root, f"{backend}-none").exists()


@in_turn
def test_steps_that_do_not_end_are_not_written_and_harm_nothing(backend, root):
    on_ranks(ended, backend, root)
    (trace,) = Path(root, f"{backend}-ended").iterdir()
    assert trace.name == "steps-1-1.rank0.trace.json"
    assert steps_in(trace) == ["ProfilerStep#1"]
