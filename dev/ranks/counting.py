"""Counts the bytes that an engine holds, by what they are for, from its live tensors."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.distributed import Work
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

__all__ = ["begin", "counted", "peak_of", "storages"]


def _locals(tensor: Tensor) -> Iterator[Tensor]:
    """The memory behind a tensor: of a shard, of a parameter of stage 3, or the tensor's own."""
    if isinstance(tensor, DTensor):
        yield tensor._local_tensor
        return
    yield tensor.data
    if hasattr(tensor, "ds_tensor"):
        yield tensor.ds_tensor.data
    if (secondary := getattr(tensor, "ds_secondary_tensor", None)) is not None:
        yield secondary.data


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of each storage by its address."""
    found = {}
    for tensor in tensors:
        for each in _locals(tensor):
            if each.device.type != "meta" and each.untyped_storage().nbytes():
                found[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return found


def begin() -> None:
    """Forget what Python holds now: `counted` does not see it."""
    gc.collect()
    gc.freeze()


def _live() -> dict[int, int]:
    """Every tensor that Python holds since `begin`, without what is not floating (ranks of a mesh, flags) and what is
    0-d (norms)."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if isinstance(found, Tensor)]
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    return storages(tensor for tensor in tensors if tensor.dim() and tensor.is_floating_point())


def counted(engine: Any) -> dict[str, int]:
    """Bytes of a model's parameters, master weights, optimizer state and gradients, and of all else that Python holds
    since `begin`."""
    optimizer = engine._adapter.updates.torch_optimizer
    parameters = list(engine.module.parameters())
    own = storages(parameters)
    stepped = storages(tensor for group in optimizer.param_groups for tensor in group["params"])
    stepped |= storages(tensor for tensor in optimizer.state if isinstance(tensor, Tensor))
    stepped |= storages(getattr(engine._adapter.updates.optimizer_state, "stepped", {}).values())
    states = [*optimizer.state.values(), *getattr(optimizer, "small", {}).values()]
    eight_bit = [tensor for moments in getattr(optimizer, "moments", {}).values() for tensor in moments.tensors]
    flat = getattr(engine._adapter.updates.optimizer_state, "_masters", None)
    stepped |= storages(flat.shards) if eight_bit and flat is not None else {}
    state = storages(
        [*(value for values in states for value in values.values() if isinstance(value, Tensor)), *eight_bit]
    )
    every = [*parameters, *(tensor for group in optimizer.param_groups for tensor in group["params"])]
    gradients = storages(tensor.grad for tensor in every if tensor.grad is not None)
    buffers = storages(engine.module.buffers())
    named = {"parameters": own, "masters": stepped, "optimizer": state, "gradients": gradients, "buffers": buffers}
    seen: set[int] = set()
    sums = {}
    for name, found in named.items():
        sums[name] = sum(size for address, size in found.items() if address not in seen)
        seen |= found.keys()
    sums["rest"] = sum(size for address, size in _live().items() if address not in seen)
    return sums


def peak_of(run: Callable[[], object]) -> int:
    """The most bytes that torch's CPU allocator hands out during a call, beyond those of before, C++ included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded, _buffers_released():
        run()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@contextlib.contextmanager
def _buffers_released() -> Iterator[None]:
    """Give the thread of gloo time to release the buffers of a finished collective, else it does so some time after the
    collective."""
    wait = Work.wait

    def patient(work: Work, *args: Any) -> bool:
        done = wait(work, *args)
        time.sleep(3e-3)
        return done

    Work.wait = patient  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Work.wait = wait  # type: ignore[method-assign]
