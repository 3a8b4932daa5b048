"""What `profile` writes: a trace that holds the chosen steps, the same on every engine."""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist
from harness import EACH, config, in_ranks, my_rank, own_share, prepare, train


def steps_in(path):
    events = json.loads(path.read_text())["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert any(name.startswith("aten::") for name in names)
    return sorted({name for name in names if name.startswith("ProfilerStep#")})


@in_ranks(cells=EACH, in_turn=True)
def test_a_trace_holds_the_chosen_steps(backend, root):
    """Steps 2 and 3 share a trace, 5 has one of its own; step 2 is discarded once."""
    profile = {"steps": [2, 3, 5], "dir": root, "memory": True, "ranks": "all"}
    with prepare(config(backend, profile=profile, training={"gradient_accumulation_steps": 2})) as engine:
        for turn, micro_batch in enumerate(engine.batches(own_share(12))):
            loss = engine(**micro_batch).loss
            if turn == 2:
                engine.discard()
                continue
            engine.backward(loss)
            engine.step()
    dist.barrier()
    files = [
        f"steps-{steps}.rank{rank}.{kind}.json"
        for steps in ("2-3", "5-5")
        for rank in (0, 1)
        for kind in ("memory", "trace")
    ]
    assert sorted(path.name for path in Path(root).iterdir()) == files
    own = f"rank{my_rank()}"
    assert steps_in(Path(root, f"steps-2-3.{own}.trace.json")) == ["ProfilerStep#2", "ProfilerStep#3"]
    assert steps_in(Path(root, f"steps-5-5.{own}.trace.json")) == ["ProfilerStep#5"]
    points = json.loads(Path(root, f"steps-2-3.{own}.memory.json").read_text())["points"]
    assert points == sorted(points)
    assert max(size for _, size in points) > 0


@in_ranks(cells=EACH, in_turn=True)
def test_steps_that_do_not_come_leave_no_file(backend, root):
    with prepare(config(backend, profile={"steps": [9], "dir": f"{root}/none"})) as engine:
        train(engine, own_share(2))
    assert not Path(root, "none").exists()


@in_ranks(cells=EACH, in_turn=True)
def test_steps_that_do_not_end_are_not_written_and_harm_nothing(backend, root):
    """A run that ends inside a chosen step, after one that is written; only rank 0 is traced."""
    profile = {"steps": [1, 3, 4], "dir": root, "shapes": True}
    with prepare(config(backend, profile=profile, training={"gradient_accumulation_steps": 2})) as engine:
        train(engine, own_share(6))
        engine.backward(engine(**own_share(1)[0]).loss)
    dist.barrier()
    (trace,) = Path(root).iterdir()
    assert trace.name == "steps-1-1.rank0.trace.json"
    assert steps_in(trace) == ["ProfilerStep#1"]
