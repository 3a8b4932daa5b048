"""How the gradients of a window are reduced before its step, and how a window is discarded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from unishard_deepspeed.kind import Kind


def reduce_gradients(engine: Any) -> None:
    """Do the first part of `engine.step()` (runtime/engine.py): reduce at stages 0 and 1, finish the window at 2 and 3.

    Collective. At stage 0 every parameter must have a gradient.
    """
    engine._running_engine_step = True  # is_gradient_accumulation_boundary() answers with it
    try:
        if engine.zero_optimization_partition_gradients():
            engine.optimizer.finalize_gradient_accumulation_boundary()
        else:
            engine.allreduce_gradients()
    finally:
        engine._running_engine_step = False


@contextmanager
def already_reduced(engine: Any) -> Iterator[None]:
    """A block in which `engine.step()` does not reduce again."""
    optimizer, reduces = engine.optimizer, engine.enable_backward_allreduce
    finishes = hasattr(optimizer, "finalize_gradient_accumulation_boundary")
    own = vars(optimizer).get("finalize_gradient_accumulation_boundary")  # `average_between_groups`
    engine.enable_backward_allreduce = False
    if finishes:
        optimizer.finalize_gradient_accumulation_boundary = lambda: None
    try:
        yield
    finally:
        engine.enable_backward_allreduce = reduces
        if own is not None:
            optimizer.finalize_gradient_accumulation_boundary = own
        elif finishes:
            del optimizer.finalize_gradient_accumulation_boundary


def drop_gradients(engine: Any, kind: Kind) -> None:
    """Drop all gradients, as `optimizer.step()` does after an overflow, and reset the count of backward calls."""
    optimizer = engine.optimizer
    engine.zero_grad()
    engine._unmanaged_backward_count = 0
    if kind == "stage-3":
        _drop_stage_3(optimizer)
    elif kind == "stages-1-2":
        _drop_partitioned(optimizer)


def _drop_stage_3(optimizer: Any) -> None:
    optimizer.zero_grad()
    optimizer._pre_step()
    optimizer._partition_all_parameters()
    optimizer.grad_partitions_flat_buffer.zero_()
    optimizer.averaged_gradients = {}
    optimizer.reset_cpu_buffers()


def _drop_partitioned(optimizer: Any) -> None:
    optimizer.zero_grad()
    optimizer.micro_step_id = -1  # INITIAL_MICRO_STEP_ID
    optimizer._offload_accumulated_param_ids = set()
    optimizer._epilogue_ran_this_backward = False
    # What a backward that has raised an error leaves.
    optimizer.params_already_reduced = [False] * len(optimizer.params_already_reduced)
    for bucket in optimizer.ipg_buckets.values():
        bucket.clear()
    for gradients in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
        for index in gradients:
            gradients[index] = None
    optimizer.reset_cpu_buffers()


def clear_offloaded(optimizer: Any, kind: Kind) -> None:
    """Zero offloaded gradients: DeepSpeed overwrites only those of used parameters and applies the others again in
    every update.

    (runtime/zero/stage_1_and_2.py, _finalize_cpu_offload_gradient_accumulation; runtime/zero/stage3.py,
    _finalize_offload_gradient_accumulation; neither is in the norm.) Stage 2 also keeps the sums, to which it adds the
    gradient of a parameter that the first micro-batch of a window does not use (async_accumulate_grad_in_cpu_via_gpu),
    and after a skipped update the averages, so that all later updates are skipped as well.
    """
    for master in (
        optimizer.fp32_partitioned_groups_flat if kind == "stage-3" else optimizer.single_partition_of_fp32_groups
    ):
        if master.grad is not None:
            master.grad.zero_()
    if kind == "stages-1-2":
        optimizer.averaged_gradients.clear()
        for total in optimizer.accumulated_grads_in_cpu.values():
            total.zero_()
