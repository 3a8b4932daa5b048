"""`training.batch_ramp`: windows that grow, as in plain torch, wherever a run is stopped and whatever resumes it."""

from __future__ import annotations

from itertools import pairwise

from harness import (
    EACH,
    OTHER,
    SPANNING,
    assert_conforms,
    curve,
    everyones,
    in_ranks,
    own_share,
    prepare,
    refused,
    tolerance,
    train,
    update,
)
from harness import config as plain
from torch.testing import assert_close

import unishard
from unishard.testing import oracle
from unishard.testing.models import MODELS, batch

RAMP = {"batch_ramp": [[0, 1], [2, 2], [3, 4]], "gradient_accumulation_steps": 4}
STARTS = (0, 1, 2, 4, 8, 12, 14)
"""Of the windows of 14 micro-batches; the last one has half of its own."""
ROWS = 42
"""On 2 ranks in micro-batches of 2, an epoch has 11 micro-batches: its windows are 1, 1, 2, 4 and 3 long."""


def config(backend, strategy, training=(), **sections):
    return plain(backend, strategy, training=RAMP | dict(training), **sections)


@in_ranks(cells=SPANNING)
def test_updates_are_those_of_plain_torch(backend, strategy, precision):
    cfg = config(backend, strategy, precision=precision, scheduler={"name": "linear", "total_steps": 7})
    with prepare(cfg) as engine:
        assert (len(engine.windows(own_share(14))), len(engine.batches(own_share(14)))) == (6, 14)
        done = train(engine, own_share(14))
    windows = [everyones(start, stop, world=2) for start, stop in pairwise(STARTS)]
    wanted = oracle.train(MODELS["mlp"].build(), windows, cfg, world=2)
    assert_conforms(curve(done), wanted, tolerance(backend, strategy, precision))


def rows():
    return [{name: value[0] for name, value in batch("mlp", row, 1).items()} | {"row": row} for row in range(ROWS)]


def trained(cfg, stop=None, discard=None):
    """Rows and losses of this rank's micro-batches by update, over 2 epochs or up to an update, which is saved."""
    windows = [[]]
    with prepare(cfg) as engine:
        loader, updates = unishard.dataloader(rows(), cfg), engine.resumed.step if engine.resumed else 0
        for _ in range(engine.resumed.epoch if engine.resumed else 0, 2):
            for each in engine.batches(loader):
                seen = each.pop("row").tolist()
                loss = engine(**each).loss
                engine.backward(loss)
                if updates == discard:
                    engine.discard()
                    windows[-1], discard = [], None
                    continue
                windows[-1].append((seen, loss.item()))
                if engine.step().updated:
                    windows.append([])
                    updates += 1
                    if updates == stop:
                        engine.save()
                        return windows[:-1]
    assert not windows.pop()
    return windows


def split(windows):
    """Rows, and losses."""
    return [[list(part) for part in zip(*window, strict=True)] for window in windows]


@in_ranks(cells=(("fsdp", "shard_grad_op", "step"), ("deepspeed", "full_shard", "drop")))
def test_a_run_goes_on_where_it_was_in_the_ramp(backend, strategy, last_window, root):
    """Bit by bit on the same engine, and on the other one."""
    training = {"last_window": last_window, "micro_batch_size": 2}
    whole = trained(config(backend, strategy, training))
    lengths = [1, 1, 2, 4, 3, 4, 4, 3] if last_window == "step" else [1, 1, 2, 4, 4, 4]
    assert [len(window) for window in whole] == lengths
    for stop, resumed_on in ((1, backend), (3, OTHER[backend]), (4, backend)):
        kept = {"dir": f"{root}/{stop}", "on_existing": "resume"}
        assert trained(config(backend, strategy, training, checkpoint=kept), stop) == whole[:stop]
        rest = trained(config(resumed_on, strategy, training, checkpoint=kept))
        if resumed_on == backend:
            assert rest == whole[stop:]
        else:
            assert_close(split(rest), split(whole[stop:]), rtol=1e-5, atol=0)


@in_ranks(cells=EACH, in_turn=True)
def test_a_window_by_hand_is_as_long_as_its_update_says(backend, root):
    def lengths(engine):
        return [next(count for count in range(1, 9) if update(engine, batch).updated) for _ in range(5)]

    (batch,) = own_share(1)
    cfg = config(backend, "no_shard", checkpoint={"dir": root})
    with prepare(cfg) as engine:
        assert lengths(engine) == [1, 1, 2, 4, 4]
        engine.save()
    with prepare(cfg) as engine:
        engine.load()
        assert lengths(engine) == [4] * 5


@in_ranks(cells=EACH, in_turn=True)
def test_a_discarded_window_is_not_counted(backend):
    for last_window, expected in {"step": [1, 1, 2, 4, 1, 4, 4, 3], "drop": [1, 1, 2, 4, 4, 4]}.items():
        training = {"last_window": last_window, "micro_batch_size": 2}
        windows = trained(config(backend, "no_shard", training), discard=2)
        assert [len(window) for window in windows] == expected


@in_ranks(cells=EACH, in_turn=True)
def test_who_says_where_a_window_ends_has_no_ramp(backend):
    with prepare(config(backend, "no_shard")) as engine:
        said = refused(engine.framework.set_boundary, True)
    assert "remove training.batch_ramp" in said
