"""What one rank does and the others do not."""

from __future__ import annotations

import torch
from harness import checked as config
from harness import my_rank

import unishard
from mistakes.mistake import elsewhere, mistake
from unishard.testing.models import MODELS

_FAULTS = "tests/ranks/test_faults.py::"
_PLAYED = _FAULTS + "test_a_fault_ends_as_the_page_says"

elsewhere("an error on one rank, before, inside or after `prepare`", _PLAYED)
elsewhere("a rank that is killed, for example for lack of memory", _PLAYED)
elsewhere("`sys.exit()` on one rank", _PLAYED)
elsewhere("`if rank == 0: engine.mean(loss)`", _PLAYED)
elsewhere("`if rank == 0: engine.save(folder)`", _PLAYED)
elsewhere("`if rank == 0: torch.distributed.barrier()`", _PLAYED)
elsewhere("another `clip_grad_norm` on each rank", _PLAYED)
_ALONE = "tests/ranks/test_same_values.py::test_what_one_rank_writes_alone_is_one_error_that_names_ranks_and_values"
elsewhere('`engine.optimizer.param_groups[0]["lr"] = ...` on one rank', _ALONE)
elsewhere("a weight that one rank writes, where each rank holds it in full", _ALONE)
elsewhere("two engines, updated in another order on each rank", _PLAYED)
elsewhere(
    "a branch in the forward that depends on the data, under `full_shard`",
    _FAULTS + "test_ranks_in_other_branches_are_told_of_conditional_modules",
)
elsewhere(
    "a batch of another task on each rank, with a head for each task",
    "tests/ranks/test_reached_parameters.py::test_ranks_that_train_different_parameters_are_told_before_anything_is_reduced",
)
elsewhere(
    "a collective of your own in the forward of one rank",
    "tests/ranks/test_desync.py::test_a_rank_that_waits_in_a_collective_inside_a_call_is_found",
)
elsewhere(
    "Ctrl-C or SIGTERM, twice, while a rank waits for one that never comes",
    _FAULTS + "test_the_second_signal_ends_a_rank_that_is_stuck_in_a_collective",
)


def _prepare_with(backend, optimizer, scheduler=None):
    unishard.prepare(MODELS["mlp"].build(), config(backend, optimizer=None), optimizer, scheduler).close()


@mistake("an optimizer function that gives each rank another rate")
def other_rates(backend):
    _prepare_with(backend, lambda parameters: torch.optim.SGD(parameters, lr=0.1 * (1 + my_rank())))


@mistake("an optimizer function that makes another class on each rank")
def other_optimizers(backend):
    _prepare_with(backend, lambda parameters: (torch.optim.SGD, torch.optim.Adagrad)[my_rank()](parameters, lr=0.1))


@mistake("a scheduler function that starts at another rate on each rank")
def other_schedulers(backend):
    part = 1 / (1 + my_rank())
    _prepare_with(
        backend,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: part),
    )
