"""Ranks that make different calls: one error on all of them, within seconds, that names who is where."""

from __future__ import annotations

import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import BACKENDS, DEEP, heard, own_share, play, prepare, train
from harness import checked as config

from unishard.distributed import process_group
from unishard.failures import collective_check
from unishard.failures.digest_exchange import DigestExchange
from unishard.testing import RankFailure, run_ranks

LIMIT = 10.0


def outcome(scenario, *arguments):
    """Seconds until it raised, and what; `timed_out` of a scenario that ends well is the failure of a test."""
    start = time.monotonic()
    try:
        scenario(*arguments)
    except Exception as error:
        return time.monotonic() - start, type(error).__name__, str(error)
    return time.monotonic() - start, "nothing", ""


# -- misuse: what each rank does after a good update -----------------------------------------------


def step_on_one_rank(engine, rank, batch):
    engine.backward(engine(**batch).loss)
    if rank == 0:
        engine.step()
    engine.mean(1.0)


def forward_twice_on_one_rank(engine, rank, batch):
    loss = engine(**batch).loss
    if rank == 1:
        loss = engine(**batch).loss
    engine.backward(loss)


def one_batch_more(engine, rank, batch):
    for _ in range(2 + (rank == 1)):
        engine.backward(engine(**batch).loss)
        engine.step()
    engine.mean(1.0)


def other_window(engine, rank, batch):
    """Loops without `batches`, in which one rank starts in the middle of a window."""
    if rank == 0:
        engine._order.place.window = 2
    engine.backward(engine(**batch).loss)
    engine.step()


def evaluation_on_one_rank(engine, rank, batch):
    if rank == 0:
        engine.eval()
        with torch.no_grad():
            engine(**batch)
        engine.train()
    engine.backward(engine(**batch).loss)


def leaves_the_loop(engine, rank, batch):
    for index, _ in enumerate(engine.batches(iter([batch] * 3))):
        if rank == 1 and index == 1:
            break
        engine.backward(engine(**batch).loss)
        engine.step()
    engine.mean(1.0)


def prepares_again(engine, rank, batch):
    if rank == 1:
        prepare(config("fsdp"))
    engine(**batch)


UPDATE = "(update 2, micro-batch 1 of 1)"
MISUSE = {
    step_on_one_rank: ("rank 0 is in engine.step " + UPDATE, "rank 1 is in engine.mean " + UPDATE),
    forward_twice_on_one_rank: ("rank 0 is in engine.backward " + UPDATE, "rank 1 is in engine.forward " + UPDATE),
    one_batch_more: (
        "rank 0 is in engine.mean (update 4",
        "rank 1 is in engine.forward (update 4, micro-batch 1 of 1)",
    ),
    other_window: (
        "rank 0 is in engine.forward (update 2, micro-batch 1 of 2)",
        "rank 1 is in engine.forward " + UPDATE,
    ),
    evaluation_on_one_rank: ("rank 0 is in engine.eval (update 2", "rank 1 is in engine.forward " + UPDATE),
    leaves_the_loop: ("rank 0 is in engine.forward (update 3", "rank 1 is in engine.mean (update 3"),
    prepares_again: ("rank 0 is in engine.forward " + UPDATE, "rank 1 is in unishard.prepare"),
}


def misuse(scenario, backend, strategy):
    with prepare(config(backend, strategy)) as engine:
        batch = own_share(1)[0]
        train(engine, [batch])
        return outcome(scenario, engine, dist.get_rank(), batch)


CELLS = tuple(
    (scenario, backend, strategy)
    for turn, scenario in enumerate(MISUSE)
    for first, backend in enumerate(BACKENDS)
    for second, strategy in enumerate(("no_shard", "full_shard"))
    if DEEP or (turn + first + second) % 2
)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join((cell[0].__name__, *cell[1:])))
def test_different_calls_are_one_error_on_every_rank(cell):
    played = play(tuple((misuse, cell) for cell in CELLS))[misuse, cell]
    found = [rank.value for rank in played]
    assert None not in found, played
    for seconds, kind, message in found:
        assert seconds < LIMIT
        assert kind == "RankMismatchError"
        for part in MISUSE[cell[0]]:
            assert part in message
    assert len({message for _, _, message in found}) == 1


# -- ranks that leave, die, or wait elsewhere ------------------------------------------------------


def closes_early(backend):
    with prepare(config(backend)) as engine:
        train(engine, own_share(1))
        if dist.get_rank() == 1:
            return None
        return outcome(lambda: engine(**own_share(1)[0]))


def waits_inside(backend):
    """A collective of its own in the forward of one rank, which the other one leaves for its next call."""
    engine = prepare(config(backend, "no_shard", communication={"desync_timeout": 0.8}))
    train(engine, own_share(1))
    if dist.get_rank() == 1:
        engine.module.register_forward_hook(lambda *_: dist.barrier())
    start = time.monotonic()
    try:
        engine.backward(engine(**own_share(1)[0]).loss)
    finally:
        assert time.monotonic() - start < 6 * 0.8 + 3


def takes_long_updates(backend):
    """Healthy updates that together take longer than the time after which one long call is named, none of them
    checked."""
    with prepare(config(backend, communication={"desync_timeout": 0.5})) as engine, heard() as said:
        train(engine, own_share(10))
        engine.module.blocks[0].register_forward_hook(lambda *_: time.sleep(0.4))
        for batch in own_share(9):
            engine.backward(engine(**batch).loss)
            engine.step()
    return [message for message in said if "has been in" in message]


def answers(scenario, backend, world=2):
    """By rank; of a run in which a rank ended on purpose, what the others raised."""
    return run_ranks(world, scenario, backend, timeout=60)


def test_a_rank_that_returns_from_the_loop_is_named():
    scenario = (closes_early, ("fsdp",))
    seconds, kind, message = play((scenario,), world=3)[scenario][2].value
    assert seconds < LIMIT
    assert kind == "RankMismatchError"
    assert "ranks 0, 2 are in engine.forward (update 2" in message
    assert "rank 1 has closed the engine" in message


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_waits_in_a_collective_inside_a_call_is_found(backend):
    with pytest.raises(RankFailure) as failure:
        answers(waits_inside, backend)
    error = failure.value.errors[0]
    assert error.type == "RankMismatchError"
    assert "rank 0 is in engine.backward (update 2, micro-batch 1 of 1)" in error.message
    assert (
        "rank 1 is in engine.forward (update 2, micro-batch 1 of 1), waits in torch.distributed at test_desync.py"
        in error.message
    )


def test_no_healthy_run_is_warned_of():
    assert answers(takes_long_updates, "fsdp") == [[], []]


def in_a_group_of_the_callers(backend):
    dist.init_process_group("gloo", timeout=timedelta(hours=3))
    with prepare(config(backend)) as engine:
        assert process_group.timeout() == timedelta(hours=3), "also of the groups that the engine makes"
        batch = own_share(1)[0]
        train(engine, [batch])
        return outcome(step_on_one_rank, engine, dist.get_rank(), batch)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_places_are_told_through_a_group_of_the_callers_too(backend):
    for _, kind, message in answers(in_a_group_of_the_callers, backend):
        assert kind == "RankMismatchError"
        assert all(part in message for part in MISUSE[step_on_one_rank])


def what_is_read_from_the_device(backend):
    """On CUDA the watch asks the device in these blocks; what is in them, in their order."""
    seen = []

    @contextmanager
    def reading(self, device):
        seen.append(device.type)
        yield
        seen.append("read")

    with prepare(config(backend)) as engine:
        collective_check.Member.reading, update = reading, engine._adapter.updates.update
        engine._adapter.updates.update = lambda *arguments, **options: (
            seen.append("update") or update(*arguments, **options)
        )
        train(engine, own_share(1))
    return seen


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_watch_is_told_where_the_host_waits_for_the_device(backend):
    assert answers(what_is_read_from_the_device, backend) == [["cpu", "read", "cpu", "update", "read"]] * 2


def exchanges_of_short_updates(backend):
    """Times that ranks wait for each other in the check: in an update of the first ten, in later ones up to the
    twentieth and in the next, and in a mean after them."""
    compare, made = DigestExchange.compare, []
    DigestExchange.compare = lambda *args: made.append(1) or compare(*args)
    samples_all = collective_check.samples_all
    collective_check.samples_all = lambda updates, seconds: samples_all(updates, 0.0)  # as if none were long

    def exchanges(act):
        before = len(made)
        act()
        return len(made) - before

    def update():
        engine.backward(engine(**batch).loss)
        engine.step()

    with prepare(config(backend, "no_shard")) as engine:
        batch = own_share(1)[0]
        first = exchanges(update)
        for _ in range(10):
            update()
        return first, [exchanges(update) for _ in range(10)], exchanges(lambda: engine.mean(1.0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_wait_for_each_other_in_few_short_updates(backend):
    first, later, between = answers(exchanges_of_short_updates, backend)[0]
    assert answers(exchanges_of_short_updates, backend) == [(first, later, between)] * 2
    assert (first, between) == (3, 1)
    assert later[-1] == 2, "where it begins, and before its step"
    assert sorted(later[:-1]) in ([0] * 9, [0] * 8 + [3]), "in one of forty, the guards look"


# -- switched off, and free of charge with one rank ------------------------------------------------


def groups_made(enabled):
    made = []
    new_group = dist.new_group
    dist.new_group = lambda *args, **kwargs: made.append(1) or new_group(*args, **kwargs)
    try:
        with prepare(config("fsdp", communication={"desync_check": enabled})) as engine:
            return len(made), len(train(engine, own_share(2)))
    finally:
        dist.new_group = new_group


@pytest.mark.parametrize(("enabled", "world", "groups"), [(True, 2, 1), (False, 2, 0), (True, 1, 0)])
def test_the_check_has_a_group_of_its_own_only_where_it_is_on(enabled, world, groups):
    assert run_ranks(world, groups_made, enabled) == [(groups, 2)] * world
