"""Options of the optimizer and weights that a script writes on one rank only: one error that names the ranks and the
values."""

from __future__ import annotations

import re

import pytest
import torch
from harness import BACKENDS, DEEP, checked, my_rank, play, prepare, values

from unishard.errors import RankMismatchError
from unishard.testing.models import batch

EARLY, LATE = 3, 13
"""After which update: before one whose calls are compared, and before one whose calls are not."""


def learning_rate(engine, factor):
    engine.optimizer.param_groups[0]["lr"] = 0.1 * factor


def weight_decay(engine, factor):
    engine.optimizer.param_groups[0]["weight_decay"] = factor


@torch.no_grad()
def in_place(engine, factor):
    engine.module.head.weight.mul_(factor)


def through_data(engine, factor):
    engine.module.head.weight.data.mul_(factor)


@torch.no_grad()
def sent_by_rank_0(engine, factor):
    """One write more on rank 0, and the same values in the end."""
    if my_rank() == 0:
        engine.module.head.weight.mul_(factor)
    torch.distributed.broadcast(engine.module.head.weight.data, 0)


def written(backend, strategy, write, after, ranks):
    """After how many updates something was raised, and what."""
    done, micro_batch = 0, batch("mlp", 2 * my_rank(), 2)
    try:
        with prepare(checked(backend, strategy)) as engine:
            while done < 22:
                engine.backward(engine(**micro_batch).loss)
                engine.step()
                done += 1
                if done == after and my_rank() in ranks:
                    write(engine, 0.5)
    except RankMismatchError as error:
        return done, str(error)
    return done, ""


CHECKSUM = "with the checksum [0-9a-f]{8}"
ALONE = {
    "a learning rate": ("no_shard", learning_rate, EARLY, "lr", "0.1", "0.05"),
    "another option, later": ("no_shard", weight_decay, LATE, "weight_decay", "0.0", "0.5"),
    "a weight in place": ("no_shard", in_place, EARLY, "head.weight", CHECKSUM, CHECKSUM),
    "a weight past autograd, later": ("no_shard", through_data, LATE, "head.weight", CHECKSUM, CHECKSUM),
}
TOGETHER = [("no_shard", write) for write in (learning_rate, in_place, through_data, sent_by_rank_0)]


def in_turn(cases):
    """Each with one engine, with `--deep` with both."""
    return [
        (backend, case)
        for number, case in enumerate(cases)
        for turn, backend in enumerate(BACKENDS)
        if DEEP or (number + turn) % 2
    ]


SCENARIOS = tuple(
    (written, arguments)
    for arguments in (
        *((backend, *ALONE[case][:3], (1,)) for backend, case in in_turn(ALONE)),
        *((backend, *case, EARLY, (0, 1)) for backend, case in in_turn(TOGETHER)),
    )
)


@pytest.mark.parametrize(("backend", "case"), in_turn(ALONE))
def test_what_one_rank_writes_alone_is_one_error_that_names_ranks_and_values(backend, case):
    strategy, write, after, name, first, second = ALONE[case]
    found = values(play(SCENARIOS)[written, (backend, strategy, write, after, (1,))])
    assert found[0] == found[1], "the same error on both"
    done, message = found[0]
    assert done == {EARLY: EARLY, LATE: 20}[after], "in the next update whose calls are compared"
    assert re.match(
        rf"learning rates, other options or weights differ between ranks in engine.step \(update {done + 1}, "
        r"micro-batch 1 of 1\): "
        rf"rank 0 has {name} {first}[,;] .*rank 1 has {name} {second}[,;] .*write the same values on every rank",
        message,
    ), message


@pytest.mark.parametrize(("backend", "case"), in_turn(TOGETHER))
def test_what_all_ranks_write_alike_is_no_error(backend, case):
    assert values(play(SCENARIOS)[written, (backend, *case, EARLY, (0, 1))]) == [(22, ""), (22, "")]
