"""What a step moves and holds, counted: collectives as torch's dispatcher sees them, memory as its tensors and its
allocator say.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from benchmarks.peers.cell import Cell
from benchmarks.peers.loops import config
from unishard.config.topology import Topology
from unishard.contract import registry
from unishard.contract.footprint import Collective, itemsize
from unishard.engine.model.units import shape_of

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "ranks"))  # what the tests count with

from counting import peak_of, storages
from recording import Event, Recorder

_TRIES = 2
"""Steps whose memory is looked at: a thread of gloo may free its buffers later than the next ones are allocated."""
COUNTED = 1 + _TRIES
"""Steps that `counted` makes."""
_LOCAL = ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd")
_FUNCTIONAL = {"_c10d_functional::all_reduce": "all_reduce", "_c10d_functional::all_reduce_": "all_reduce"}
"""By which DTensors add up a norm."""


class _Recorder(Recorder):
    """Sees also the collectives inside operations on DTensors, which run before any mode unless it declines."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


class Counts(NamedTuple):
    """Of one optimizer step on one rank."""

    collectives: int
    nbytes: int
    """Sent, by the ring algorithms that the plan has formulas of."""
    peak: int
    """Most bytes that torch's allocator hands out during the step, beyond those held between steps."""


def counted(step: Callable[[], Any], world: int) -> Counts:
    """Count steps of a loop that has made some already. Collective.

    Raises:
        RuntimeError: It calls a collective that the formulas do not know.
    """
    recorder = _Recorder()
    with recorder:
        step()
    events = [event for event in recorder.events if event.numel and event.kind not in _LOCAL]
    peak = min(peak_of(step) for _ in range(_TRIES))
    return Counts(len(events), sum(sent(event, world) for event in events), peak)


def sent(event: Event, world: int) -> int:
    """Bytes that one rank sends in a recorded collective.

    Raises:
        RuntimeError: There is no formula for it.
    """
    kind: Any = _FUNCTIONAL.get(event.kind, event.kind)
    if "::" in kind:
        raise RuntimeError(f"{kind} was called, and nothing here says how many bytes it sends")
    return Collective(kind, "gradients", "step", event.numel * itemsize(event.dtype), world).sent()


def theory(cell: Cell, world: int) -> int:
    """Bytes that one rank sends in an optimizer step by `unishard plan`."""
    cfg = config(cell)
    with torch.device("meta"):
        model = cell.build()
    footprint = registry.get(cell.engine).footprint(shape_of(model, cfg.sharding), cfg, Topology(world, world))
    return sum(each.sent() for each in footprint.traffic)


def held(apart_from: Mapping[int, int]) -> dict[int, int]:
    """Bytes of the storages of all tensors of this process, by address, without those of before."""
    gc.collect()
    found = storages(each for each in gc.get_objects() if isinstance(each, torch.Tensor))
    return {address: size for address, size in found.items() if address not in apart_from}
