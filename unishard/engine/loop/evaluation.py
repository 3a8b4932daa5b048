"""Evaluation on every engine: forwards without a graph, generation, loops of different length, and gathered metrics."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from unishard.data.sampler import ShareSampler
from unishard.distributed import gather
from unishard.engine.adapter import InferenceAdapter
from unishard.engine.loop.call_order import CallOrder
from unishard.engine.loop.lockstep import Call, Lockstep
from unishard.engine.model.inputs import tensors_in
from unishard.errors import ContractError

__all__ = ["Evaluation"]


class Evaluation:
    """What an engine does in evaluation mode, the same on every engine. Each method is the engine's of the same name."""

    def __init__(self, adapter: InferenceAdapter, order: CallOrder, *, trains: bool) -> None:
        self._adapter = adapter
        self._order = order
        self._trains = trains
        self.lockstep_open: Lockstep | None = None
        """While a `lockstep` block runs."""
        self._tail: tuple[int, int] | None = None
        """While the last batches of a padding loader are out: the samples of all ranks, and those of them that are not repeated."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own `generate`, without a graph."""
        generate = getattr(self._adapter.module, "generate", None)
        if not callable(generate):
            raise ContractError("the model has no method generate; write the loop over engine(...) inside engine.lockstep()")
        if self._adapter.forward_is_collective and dist.get_world_size() > 1 and _takes_synced_gpus(generate):
            kwargs.setdefault("synced_gpus", True)
        return self.run("generate", args, kwargs)

    @contextmanager
    def lockstep(self) -> Iterator[None]:
        """A block in which finished ranks replay their last call until every rank is done."""
        if self._adapter.module.training:
            raise ContractError("lockstep is for evaluation, since ranks without a batch have no gradient; call engine.eval() first")
        if self.lockstep_open is not None:
            raise ContractError("lockstep was entered inside lockstep; one block is enough")
        self._order.enter("lockstep", ", begin")
        self.lockstep_open = lockstep = Lockstep(self._adapter.device)
        try:
            yield
            if self._adapter.forward_is_collective:
                self._join(lockstep)
            else:
                self._order.enter("lockstep", ", end")
        finally:
            self.lockstep_open = None

    def gather_for_metrics(self, data: Any, *, pad: float | None) -> Any:
        """What all ranks computed for a batch, in the order of the dataset."""
        description = gather.describe(data, padded=pad is not None)
        self._order.enter("gather_for_metrics", f", {description}")
        return gather.gather(data, self._adapter.device, pad, self._tail)

    def run(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward or `generate` without a graph. Collective."""
        if self.lockstep_open is None:
            self._order.enter(kind)
        elif self._adapter.forward_is_collective:
            self._take_turn(self.lockstep_open, kind, (args, kwargs))
        return self._run(kind, (args, kwargs))

    def _run(self, kind: str, call: Call) -> Any:
        args, kwargs = call
        # A loss through a frozen network needs the way back to that network's inputs, and only then a graph.
        if kind == "forward" and not self._trains and torch.is_grad_enabled() and any(each.requires_grad for each in tensors_in(call)):
            return self._adapter.forward(*args, **kwargs)
        with torch.no_grad():
            return (self._adapter.forward if kind == "forward" else self._adapter.generate)(*args, **kwargs)

    def _take_turn(self, lockstep: Lockstep, kind: str | None, call: Call | None) -> tuple[str, Call] | None:
        self._order.enter("lockstep", f", turn {lockstep.taken + 1}")
        return lockstep.take(kind, call)

    def _join(self, lockstep: Lockstep) -> None:
        """Repeat calls until every rank has left the block; torch's random numbers continue as if nothing had been."""
        device = self._adapter.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            while (turn := self._take_turn(lockstep, None, None)) is not None:
                self._run(*turn)

    def mark_last(self, loader: Iterable[Any], batches: Iterable[Any]) -> Iterator[Any]:
        """The same batches; while the last one of a loader that fills up is out, `gather_for_metrics` knows it."""
        sampler = getattr(loader, "batch_sampler", None)
        if not isinstance(sampler, ShareSampler):
            yield from batches
            return
        repeated = len(sampler) * sampler.round - sampler.dataset_length
        rest, end = iter(batches), object()
        batch = next(rest, end)
        while batch is not end:
            following = next(rest, end)
            if following is end and repeated > 0:
                self._tail = (sampler.round, sampler.round - repeated)
            try:
                yield batch
            finally:
                self._tail = None
            batch = following


def _takes_synced_gpus(generate: Any) -> bool:
    """Adapters hand on whatever they get by keyword."""
    parameters = inspect.signature(generate).parameters
    return "synced_gpus" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
