"""The private names of DeepSpeed 0.19.8 that unishard relies on, all of them, with the file that defines each.

Everything else in this package goes through DeepSpeed's documented interface.
"""

from __future__ import annotations

from unishard_deepspeed.internals.building import (
    accumulate_in_fp32,
    allow_fp16,
    forget,
    forget_groups,
    keeping_groups,
    partition,
    undo_first_step,
    without_own_clipping,
)
from unishard_deepspeed.internals.masters import link_states_again, master_tensors, pieces_of_masters, set_masters, torch_optimizer, trained
from unishard_deepspeed.internals.state import copy_masters, find_states, forget_states, groups_of_masters, keep_parts_alone
from unishard_deepspeed.internals.units import (
    drop,
    gather,
    parameter_bytes,
    reduce_last,
    reduce_units_by_parameter,
    units,
    without_gathering,
)
from unishard_deepspeed.internals.updates import (
    average_between_groups,
    clear_stale_gradients,
    divide_gradients,
    give_wide_gradients,
    making_every_update,
)

__all__ = [
    "accumulate_in_fp32",
    "allow_fp16",
    "average_between_groups",
    "clear_stale_gradients",
    "copy_masters",
    "divide_gradients",
    "drop",
    "find_states",
    "forget",
    "forget_groups",
    "forget_states",
    "gather",
    "give_wide_gradients",
    "groups_of_masters",
    "keep_parts_alone",
    "keeping_groups",
    "link_states_again",
    "making_every_update",
    "master_tensors",
    "parameter_bytes",
    "partition",
    "pieces_of_masters",
    "reduce_last",
    "reduce_units_by_parameter",
    "set_masters",
    "torch_optimizer",
    "trained",
    "undo_first_step",
    "units",
    "without_gathering",
    "without_own_clipping",
]
