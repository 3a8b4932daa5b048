"""Steps of all candidates in turns: in the same ranks, whose steps are so close in time that the machine treats them
alike.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle, permutations
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.peers.cell import Cell
from benchmarks.peers.loops import config, loop_of
from benchmarks.timed import timed
from dev.ranks.counting import peak_of, storages
from dev.ranks.recording import Event, Recorder
from unishard.config.topology import Topology
from unishard.contract import registry
from unishard.contract.footprint import Collective
from unishard.contract.model_shape import itemsize
from unishard.engine.model.shape import shape_of

# --------------------------------------------------------------------------------------------------
# What a step moves and holds, counted: collectives as torch's dispatcher sees them, memory as its tensors and its
# allocator say.

_TRIES = 2
"""Steps whose memory is looked at: a thread of gloo may free its buffers later than the next ones are allocated."""
COUNTED = 1 + _TRIES
"""Steps that `counted` makes."""
_LOCAL = ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd")
_KINDS = {
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_reduce_": "all_reduce",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "c10d::alltoall_base_": "all_to_all",
}
"""The first ones are those of DTensors."""


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
    events = [each for each in recorder.events if each.numel and each.ranks != 1 and each.kind not in _LOCAL]
    peak = min(peak_of(step) for _ in range(_TRIES))
    return Counts(len(events), sum(sent(event, world) for event in events), peak)


def sent(event: Event, world: int) -> int:
    """Bytes that one rank sends in a recorded collective.

    Raises:
        RuntimeError: There is no formula for it.
    """
    kind: Any = _KINDS.get(event.kind, event.kind)
    if "::" in kind:
        raise RuntimeError(f"{kind} was called, and nothing here says how many bytes it sends")
    return Collective(kind, "gradients", "step", event.numel * itemsize(event.dtype), event.ranks or world).sent()


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


WARM_UP = 10
"""Steps that are not timed, after the first one: in that DeepSpeed's stage 3 learns the order of modules, and in the
first ten unishard compares each call of the ranks before its collectives, later two in every tenth."""


class Side(NamedTuple):
    """What one candidate did on one rank."""

    seconds: list[float]
    """Of each timed step, of the slower rank."""
    losses: list[float]
    """Of all steps until the last timed one, this rank's."""
    counts: Counts
    held: int
    """Bytes of its tensors between steps."""


class Turns(NamedTuple):
    """How long."""

    seconds: float
    """For everything that the ranks do."""
    least: int
    most: int
    """Rounds; one has a step of each candidate."""


def take_turns(cell: Cell, candidates: tuple[str, ...], plan: Turns) -> dict[str, Side]:
    """Prepare all candidates and step them in turns, in an order that changes with each round. Collective."""
    begun = time.perf_counter()
    loops: dict[str, Iterator[Tensor]] = {name: loop_of(name, cell) for name in candidates}
    losses: dict[str, list[Tensor]] = {name: [] for name in candidates}
    seconds: dict[str, list[float]] = {name: [] for name in candidates}

    def step(name: str) -> float:
        losses[name].append(next(loops[name]))
        return 0.0

    before, holds = held({}), {}
    for name in candidates:
        for _ in range(1 + WARM_UP):
            step(name)
        new = held(before)
        before |= new
        holds[name] = sum(new.values())
    spent = slowest(time.perf_counter() - begun)  # the same on all ranks, so that they stop together
    orders, last = cycle(permutations(candidates)), 0.0
    for round_ in range(plan.most):
        if round_ >= plan.least and spent + (1 + COUNTED) * last > plan.seconds:
            break
        last = 0.0
        for name in next(orders):
            seconds[name].append(timed(lambda name=name: step(name)) / 1e3)
            last += seconds[name][-1]
        spent += last
    made = {name: [float(loss) for loss in losses[name]] for name in candidates}
    return {
        name: Side(seconds[name], made[name], counted(lambda name=name: step(name), dist.get_world_size()), holds[name])
        for name in candidates
    }


def slowest(value: float) -> float:
    """The largest of the ranks' values. Collective."""
    most = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most.item()
