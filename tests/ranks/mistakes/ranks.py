"""What one rank does and the others do not."""

from __future__ import annotations

import torch
from playing import checked as config
from playing import my_rank

import unishard
from mistakes.mistake import Mistakes
from unishard.testing.models import MODELS

RANKS = Mistakes("One rank of several")
_FAULTS = "tests/ranks/test_faults.py::"
_ENDS = _FAULTS + "test_a_rank_that_ends_is_named_in_the_first_line_and_ends_the_others"
_CALLS = _FAULTS + "test_other_calls_of_one_rank_in_any_update_are_one_error_on_all"
_OPTIMIZERS = "RankMismatchError: ranks hold different optimizers; start every rank with the same:..."
_DIFFERENT = "RankMismatchError: ranks made different calls and would deadlock: "

RANKS.elsewhere(
    "an error on one rank, before, inside or after `prepare`",
    "The first line of the output is the cause, its traceback follows once, and every other rank ends with one line: "
    "unishard: rank 0 of 2 ended in engine.step (...) because rank 1 raised ValueError: a broken sample (...)",
    _ENDS,
)
RANKS.elsewhere(
    "a rank that is killed, for example for lack of memory",
    "unishard: rank 0 of 2 ended in engine.backward (...) because rank 1 is gone: its process ended without an error "
    "(killed, for lack of memory, or in C++)",
    _ENDS,
)
RANKS.elsewhere(
    "`sys.exit()` on one rank",
    "unishard: rank 0 of 2 ended in engine.step (...) because rank 1 has ended its program, or left it with sys.exit",
    _ENDS,
)
RANKS.elsewhere(
    "`if rank == 0: engine.mean(loss)`",
    _DIFFERENT + "rank 0 is in engine.mean (...); rank 1 is in engine.forward (...)",
    _CALLS,
)
RANKS.elsewhere(
    "`if rank == 0: engine.save(folder)`",
    _DIFFERENT + "rank 0 is in engine.save (...); rank 1 is in engine.forward (...)",
    _CALLS,
)
RANKS.elsewhere(
    "`if rank == 0: torch.distributed.barrier()`",
    _DIFFERENT
    + "rank 0 waits in torch.distributed at train.py:31 in main, outside unishard; rank 1 is in engine.forward "
    "(...)...",
    _CALLS,
)
RANKS.elsewhere(
    "another `clip_grad_norm` on each rank",
    _DIFFERENT
    + "rank 0 is in engine.step (..., clip_grad_norm=1.0); rank 1 is in engine.step (..., clip_grad_norm=2.0); they "
    "have trained on since, perhaps differently: go back to a checkpoint from before this",
    _CALLS,
)
_ALONE = "tests/ranks/test_same_values.py::test_what_one_rank_writes_alone_is_one_error_that_names_ranks_and_values"
_UNEQUAL = "RankMismatchError: learning rates, other options or weights differ between ranks in engine.step (...): "
_ALIKE = "; write the same values on every rank: the ranks would train parts of different models"
RANKS.elsewhere(
    '`engine.optimizer.param_groups[0]["lr"] = ...` on one rank',
    _UNEQUAL + "rank 0 has lr 0.1; rank 1 has lr 0.05" + _ALIKE,
    _ALONE,
)
RANKS.elsewhere(
    "a weight that one rank writes, where each rank holds it in full",
    _UNEQUAL + "rank 0 has head.weight with the checksum ...; rank 1 has head.weight with the checksum ..." + _ALIKE,
    _ALONE,
)
RANKS.elsewhere(
    "two engines, updated in another order on each rank",
    _DIFFERENT + "rank 0 is in engine 1.forward (...); rank 1 is in engine 2.forward (...)...",
    _CALLS,
)
RANKS.elsewhere(
    "a branch in the forward that depends on the data, under `full_shard`",
    _DIFFERENT + "rank 0 enters left (Expert) and is in engine.forward (...); rank 1 enters right (Expert) and is in "
    "engine.forward (...); all ranks must run the same modules in the same order, except those of the classes in "
    "sharding.conditional_modules: add Expert there, or let every rank take the same branch",
    _FAULTS + "test_ranks_in_other_branches_are_told_of_conditional_modules",
)
RANKS.elsewhere(
    "a batch of another task on each rank, with a head for each task",
    "RankMismatchError: ranks have gradients of different parameters, which would be added up: rank 0 is in "
    "engine.backward (...), without gradients for second (Linear); rank 1 is in engine.backward (...), without "
    "gradients for first (Linear); all ranks must use the same parameters, except those of the classes in "
    "sharding.conditional_modules: add Linear there, or let every rank take the same branch",
    "tests/ranks/test_reached_parameters.py::test_ranks_that_train_different_parameters_are_told_before_anything_is_reduced",
)
RANKS.elsewhere(
    "a collective of your own in the forward of one rank",
    _DIFFERENT + "rank 0 is in engine.backward (...); rank 1 is in engine.forward (...), waits in torch.distributed at "
    "train.py:31 in main",
    "tests/ranks/test_desync.py::test_a_rank_that_waits_in_a_collective_inside_a_call_is_found",
)
RANKS.elsewhere(
    "Ctrl-C or SIGTERM, twice, while a rank waits for one that never comes",
    "unishard: rank 0 of 2 was stuck in engine.mean (...), and was ended by a second SIGINT",
    _FAULTS + "test_the_second_signal_ends_a_rank_that_is_stuck_in_a_collective",
)


def _prepare_with(backend, optimizer, scheduler=None):
    unishard.prepare(MODELS["mlp"].build(), config(backend, optimizer=None), optimizer, scheduler).close()


@RANKS.raises(
    "an optimizer function that gives each rank another rate",
    _OPTIMIZERS + "lr of group 0: rank 0 has 0.1, rank 1 has 0.2...",
)
def other_rates(backend):
    _prepare_with(backend, lambda parameters: torch.optim.SGD(parameters, lr=0.1 * (1 + my_rank())))


@RANKS.raises(
    "an optimizer function that makes another class on each rank",
    _OPTIMIZERS + "optimizer: rank 0 has 'SGD', rank 1 has 'Adagrad'...",
)
def other_optimizers(backend):
    _prepare_with(backend, lambda parameters: (torch.optim.SGD, torch.optim.Adagrad)[my_rank()](parameters, lr=0.1))


@RANKS.raises(
    "a scheduler function that starts at another rate on each rank",
    _OPTIMIZERS + "first rates of the scheduler: rank 0 has [0.1], rank 1 has [0.05]...",
)
def other_schedulers(backend):
    part = 1 / (1 + my_rank())
    _prepare_with(
        backend,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: part),
    )
