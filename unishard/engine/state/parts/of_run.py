"""Which parts a run has, in the order in which a load goes through them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from unishard.engine.loop.buffers import Merged
from unishard.engine.state.part import Part
from unishard.engine.state.parts.average import Average
from unishard.engine.state.parts.buffers_of_ranks import BuffersOfRanks
from unishard.engine.state.parts.data_position import DataPosition
from unishard.engine.state.parts.extra_state import ExtraState
from unishard.engine.state.parts.matrices import Matrices
from unishard.engine.state.parts.random_numbers import RandomNumbers
from unishard.engine.state.parts.sharded_tensors import ShardedTensors
from unishard.engine.state.parts.training_state import TrainingState
from unishard.engine.state.parts.user_state import UserState
from unishard.engine.state.run import Run


class Parts(NamedTuple):
    """Those of one save or one load."""

    tensors: ShardedTensors
    user: UserState
    data: DataPosition
    all: Sequence[Part]
    """In the order in which a load goes through them: moments of 8 bits are read once the optimizer's state is made."""


def parts_of(run: Run, state: Any = None, merged: Merged | None = None) -> Parts:
    """The parts of a run.

    Args:
        run: The run.
        state: To save: the user's own state.
        merged: To save: the buffers of all ranks together.
    """
    tensors = ShardedTensors(run, None if merged is None else merged.values)
    user, data = UserState(state), DataPosition(run)
    parts: list[Part | None] = [
        tensors,
        run.tensors.eight_bit,
        Matrices(run.torch_optimizer),
        None if run.accumulation is None else TrainingState(run, run.accumulation),
        RandomNumbers(run),
        BuffersOfRanks(run, merged),
        user,
        ExtraState(run.adapter.module),
        Average(run.tensors, trains=run.accumulation is not None),
        data,
    ]
    return Parts(tensors, user, data, [part for part in parts if part is not None])
