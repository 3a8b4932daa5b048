"""Evaluation: forwards without a graph, generation, loops of different lengths, and gathered metrics."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unishard.contract.adapter import ShardedModel
from unishard.data.batches import to_device
from unishard.data.loader import ShareLoader
from unishard.data.sampler import ShareSampler
from unishard.distributed.nested_tensors import tensors_in
from unishard.engine.around_forward import AroundForward
from unishard.engine.guards.inference_mode import as_no_grad, without_inference_mode
from unishard.engine.loop.buffers import Buffers
from unishard.engine.loop.call_order import CallOrder
from unishard.engine.loop.gathered_results import describe, gather, has_rows
from unishard.engine.loop.lockstep import Call, Lockstep
from unishard.errors import ContractError
from unishard.failures.endings import explain_lost_connections

_NO_GRAPH = "does not require grad and does not have a grad_fn"
"""In torch's error for a gradient of a tensor without a graph (torch 2.13, csrc/autograd/autograd.cpp)."""


class Evaluation:
    """Evaluation mode, the same on every engine. Methods implement those of `Engine` with the same names."""

    def __init__(
        self,
        adapter: ShardedModel,
        order: CallOrder,
        buffers: Buffers,
        around: AroundForward,
        *,
        trains: bool,
    ) -> None:
        self._adapter = adapter
        self._order = order
        self._buffers = buffers
        self._sequences, self._calls = around.sequences, around.calls
        self._sharing = around.sharing
        self._trains = trains
        self.lockstep_open: Lockstep | None = None
        """Set inside a `lockstep` block."""
        self._running = False
        """Whether a forward or `generate` runs."""
        self._tail: tuple[int, int] | None = None
        """During the last batches of a loader that pads: the samples of all ranks, and how many of them are not
        repeated."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's `generate` without a graph."""
        generate = getattr(self._adapter.module, "generate", None)
        if not callable(generate):
            raise ContractError(
                "the model has no method generate; write a loop over engine(...) inside engine.lockstep()"
            )
        if self._adapter.forward_is_collective and dist.get_world_size() > 1 and _takes_synced_gpus(generate):
            kwargs.setdefault("synced_gpus", True)
        if self._adapter.device.type != "cpu":  # as in `Engine.__call__`
            args, kwargs = to_device((args, kwargs), self._adapter.device)
        return self.run("generate", args, kwargs)

    @without_inference_mode
    @contextmanager
    def lockstep(self) -> Iterator[None]:
        """A block in which finished ranks replay their last call until every rank is done."""
        if self._adapter.module.training:
            raise ContractError(
                "lockstep is only for evaluation, because ranks without a batch have no gradient; call engine.eval() "
                "first"
            )
        if self.lockstep_open is not None:
            raise ContractError("lockstep was entered inside lockstep; use one block")
        self._buffers.equalize_for_evaluation("lockstep")
        self._order.ranks.check_now("lockstep", ", begin")
        self.lockstep_open = lockstep = Lockstep(self._adapter.device)
        try:
            yield
            if self._adapter.forward_is_collective:
                self._join(lockstep)
            else:
                self._order.ranks.check_now("lockstep", ", end")
        finally:
            self.lockstep_open = None

    def of_module(self) -> Callable[..., Any] | None:
        """What `module.generate` is to be, since it needs the other ranks, or whole samples; None where it does not."""
        own = getattr(self._adapter.module, "generate", None)
        needs_no_rank = not self._adapter.forward_is_collective or dist.get_world_size() == 1
        if not callable(own) or (needs_no_rank and self._sequences is None):
            return None

        @functools.wraps(own)
        def generate(*args: Any, **kwargs: Any) -> Any:
            if self._running:
                return own(*args, **kwargs)
            with explain_lost_connections(), as_no_grad():
                return self.generate(*args, **kwargs)

        return generate

    def gather_for_metrics(self, data: Any, *, pad: float | None) -> Any:
        """Gather what all ranks computed for a batch, in dataset order."""
        description = describe(data, padded=pad is not None)
        self._order.ranks.check_now("gather_for_metrics", f", {description}")
        if self._sequences is not None:
            data = self._sequences.joined(data)
        gathered = gather(data, self._adapter.device, pad, self._tail, self._sharing)
        loader = ShareLoader.last_unfollowed and ShareLoader.last_unfollowed()
        if self._tail is None and loader and loader.at_repeated and has_rows(gathered, loader.round):
            raise ContractError(
                f"gather_for_metrics has {loader.round} rows of the last batches, of which {loader.repeated} are of "
                "samples that fill them up: the unishard.dataloader is read without the engine, or in a generator "
                "around it; write `for batch in engine.batches(loader):`"
            )
        return gathered

    def run(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a forward or `generate` without a graph. Collective."""
        self.require_shared(*args, *kwargs.values())
        if self.lockstep_open is None:
            self._buffers.equalize_for_evaluation(kind)
            self._order.ranks.check_sampled(kind)
        elif self._adapter.forward_is_collective:
            self._take_turn(self.lockstep_open, kind, (args, kwargs))
        return self._run(kind, (args, kwargs))

    def require_shared(self, *arguments: Any) -> None:
        """Check that ranks that have layers together pass the same tokens. Collective among these.

        Raises:
            DataError: They do not.
        """
        if self._calls is not None:
            words = [each for each in arguments if isinstance(each, Tensor)]
            self._calls.require([each for each in words if not each.is_floating_point()])  # caches are of own heads

    def _run(self, kind: str, call: Call) -> Any:
        args, kwargs = call
        # Build a graph only for a loss through a frozen network, which needs gradients of that network's inputs.
        graph = (
            kind == "forward"
            and not self._trains
            and torch.is_grad_enabled()
            and any(each.requires_grad for each in tensors_in(call))
        )
        self._running = True
        try:
            with self._order.forwarding(), self._whole(kind, call), nullcontext() if graph else torch.no_grad():
                return (self._adapter.forward if kind == "forward" else self._adapter.generate)(*args, **kwargs)
        finally:
            self._running = False

    def explain(self, error: BaseException) -> str | None:
        """What to write where a script asks for gradients of outputs in evaluation mode; None for other errors."""
        if not self._trains or self._adapter.module.training or _NO_GRAPH not in str(error):
            return None
        return (
            "engine(...) computes no graph after engine.eval(); for gradients of inputs, as by torch.autograd.grad or "
            "loss.backward(), call engine.train() before it, and put both into a block `with engine.weights.frozen():`"
        )

    def _whole(self, kind: str, call: Call) -> AbstractContextManager[None]:
        """Generation of whole samples on each rank, also where forwards get parts."""
        if self._sequences is None:
            return nullcontext()
        if kind == "forward":
            if not self._sequences.proved:
                self._sequences.prove(self._adapter.forward, *call)
            return nullcontext()
        return self._sequences.whole_samples(call)

    def _take_turn(self, lockstep: Lockstep, kind: str | None, call: Call | None) -> tuple[str, Call] | None:
        self._order.ranks.check_sampled("lockstep", f", turn {lockstep.taken + 1}")
        return lockstep.take(kind, call)

    def _join(self, lockstep: Lockstep) -> None:
        """Repeat calls until every rank has left the block; torch's random state does not change."""
        device = self._adapter.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            while (turn := self._take_turn(lockstep, None, None)) is not None:
                self._run(*turn)

    def mark_last(self, loader: Iterable[Any], batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the same batches; tell `gather_for_metrics` which one is the last of a loader that pads."""
        sampler = getattr(loader, "batch_sampler", None)
        if not isinstance(sampler, ShareSampler):
            yield from batches
            return
        repeated = sampler.repeated
        rest, end = iter(batches), object()
        batch = next(rest, end)
        while batch is not end:
            following = next(rest, end)
            if following is end and repeated:
                self._tail = (sampler.round, sampler.round - repeated)
            try:
                yield batch
            finally:
                self._tail = None
            batch = following


def _takes_synced_gpus(generate: Any) -> bool:
    """Whether `generate` accepts `synced_gpus`; wrappers such as PEFT pass keyword arguments on."""
    parameters = inspect.signature(generate).parameters
    return "synced_gpus" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
