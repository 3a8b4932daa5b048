"""One rank makes other calls, reads other data, holds another model or computes no number; and the port where the ranks
meet is taken."""

from __future__ import annotations

import math

from faulting import (
    barrier_alone,
    mean_alone,
    misuse,
    not_a_number,
    other_clip,
    other_model,
    other_order,
    port_in_use,
    reading,
    save_alone,
    skip_a_batch,
    wait_alone,
)

from faults.fault import Elsewhere, Fault, Subject

__all__ = ["CALLS"]

CALLS = Subject("One rank does something else")

_DIFFER = "unishard: rank ... of 2 ...: ranks made different calls and would deadlock: "
_FORWARD = "rank 1 is in engine.forward (update 13, micro-batch 1 of 1"
_UPDATE = "update 13"
_UNEVEN = (
    "unishard: rank ... of 2 raised RankMismatchError (...): ranks hold different numbers of batches; start "
    "every rank with the same:"
)


def _call(what: str, where: str, outcome: str, act: object) -> None:
    CALLS.rows.append(Fault(what, where, _DIFFER + outcome, misuse, (act,)))


_call("`if rank == 0: engine.mean(loss)`", _UPDATE, f"rank 0 is in engine.mean (update 13...{_FORWARD}...", mean_alone)
_call(
    "`if rank == 0: engine.save(folder)`", _UPDATE, f"rank 0 is in engine.save (update 13...{_FORWARD}...", save_alone
)
_call(
    "`if rank == 1: engine.export(folder)`",
    _UPDATE,
    "rank 0 is in engine.forward (update 13...rank 1 is in engine.export (...",
    wait_alone,
)
_call(
    "`if rank == 0: torch.distributed.barrier()`",
    _UPDATE,
    f"rank 0 waits in torch.distributed at faulting.py...in barrier_alone, outside unishard; {_FORWARD}...",
    barrier_alone,
)
_call(
    "another `clip_grad_norm` on each rank",
    _UPDATE,
    "rank 0 is in engine.step (update 13, micro-batch 1 of 1, clip_grad_norm=1.0)...clip_grad_norm=2.0)...",
    other_clip,
)
_call(
    "two engines, updated in another order on each rank",
    _UPDATE,
    "rank 0 is in engine 1.forward (update 13...rank 1 is in engine 2.forward (update 13...",
    other_order,
)
CALLS.rows += [
    Fault(
        "rank 1 skips a batch in its own loop",
        "noticed at the end of its loop",
        _DIFFER
        + "rank 0 is in engine.forward (update 31, micro-batch 1 of 1); rank 1 has ended its program, or left it with "
        "sys.exit",
        misuse,
        (skip_a_batch,),
        lines=1,
    ),
    Fault(
        "a `continue` on rank 1 skips `engine.backward` inside an accumulation window",
        "`engine.batches`",
        "unishard: rank 1 of 2 raised ContractError: a new accumulation window starts after 1 of 2 micro-batches of "
        "the last one...",
        reading,
        ("skips one",),
    ),
    Fault("a shorter list on rank 1", "`engine.batches`, at once", _UNEVEN, reading, ("a list",), short=False),
    Fault("a shorter stream on rank 1", "`engine.batches`, when it ends", _UNEVEN, reading, ("a stream",), short=False),
    Elsewhere(
        "rank 1 takes another branch of the model",
        "`engine.forward`",
        "unishard: rank ... of 2 ...: ... rank 0 enters left (Expert) and is in engine.forward (...); rank 1 enters "
        "right (Expert)...",
        "tests/ranks/test_faults.py::test_ranks_in_other_branches_are_told_of_conditional_modules",
    ),
    Fault(
        "another model on rank 1",
        "`prepare`",
        "unishard: rank ... of 2 raised RankMismatchError (...): ranks hold different models; start every rank with "
        "the same:",
        other_model,
        (),
        short=False,
    ),
    Fault(
        "a loss of NaN on rank 1",
        "one update",
        "The update is skipped on all ranks: parameters and optimizer state do not change, and training goes on.",
        not_a_number,
        ("skip", math.nan),
        kept="step-00000020",
        lines=0,
        code=0,
    ),
    Fault(
        "an infinite loss on rank 1 with `training.nonfinite: raise`",
        "one update",
        "unishard: rank ... of 2 raised NonFiniteError: a gradient is infinite or NaN on at least one rank; nothing "
        "was updated...",
        not_a_number,
        ("raise", math.inf),
        kept="step-00000012",
    ),
    Fault(
        "`MASTER_PORT` is in use by another program",
        "`prepare`",
        "unishard: rank 0 of 2 raised ConfigError: MASTER_PORT=... is in use by another program on this machine, that "
        "of rank 0; set MASTER_PORT to a free port",
        port_in_use,
        (),
    ),
]
