"""Evaluation on every engine: forwards without a graph, generation, loops of different length, and gathered metrics."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from unishard.data.sampler import ShareSampler
from unishard.distributed import gather
from unishard.engine.loop.lockstep import Call, Turns
from unishard.errors import ContractError

__all__ = ["Evaluation"]


class Evaluation(ABC):
    """What an engine does in evaluation mode, the same on every engine. `TrainingEngine` inherits it."""

    _module: nn.Module
    _device: torch.device
    _forward_is_collective: bool = True
    """Whether a forward without a graph needs the other ranks."""
    _turns: Turns | None = None
    """While a `lockstep` block runs."""
    _tail: tuple[int, int] | None = None
    """While the last batches of a loader that fills up are out: the samples of all ranks, and those of them that are no repetition."""

    @abstractmethod
    def _enter(self, call: str, detail: str = "") -> None: ...

    @abstractmethod
    def _require_open(self, call: str) -> None: ...

    @abstractmethod
    def _forward(self, *args: Any, **kwargs: Any) -> Any: ...

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own `generate`; each rank makes the same number of forwards."""
        return self._module.generate(*args, **kwargs)  # type: ignore[operator]

    # -- what a user calls ------------------------------------------------------------------------------------------------

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own `generate`, such as that of transformers, without a graph. Collective.

        Each rank gives its own inputs and gets its own sequences, as long as they come out. Where parameters are sharded, ranks
        that are done go on computing until all are, if `generate` takes `synced_gpus` as that of transformers does; one that does
        not must make the same number of forwards on every rank.

        Args:
            args: For the model's `generate`.
            kwargs: For the model's `generate`.

        Raises:
            ContractError: The model has no `generate`, or the engine is closed.
        """
        self._require_open("generate")
        if not callable(getattr(self._module, "generate", None)):
            raise ContractError("the model has no method generate; write the loop over engine(...) inside engine.lockstep()")
        if self._forward_is_collective and dist.get_world_size() > 1 and _takes_synced_gpus(self._module.generate):
            kwargs.setdefault("synced_gpus", True)
        return self._evaluate("generate", args, kwargs)

    @contextmanager
    def lockstep(self) -> Iterator[None]:
        """A block in which ranks may make different numbers of forwards, or of `generate`. Collective.

        A rank that leaves the block repeats its last call, or one of another rank if it made none, until all have left. Nothing
        of this is seen from outside; it costs one small collective a call. Evaluation mode only.

        Raises:
            ContractError: The model is in training mode, the block stands in another one, or the engine is closed.
            RankMismatchError: At the same turn one rank calls the model and another one `generate`.
        """
        self._require_open("lockstep")
        if self._module.training:
            raise ContractError("lockstep is for evaluation, since ranks without a batch have no gradient; call engine.eval() first")
        if self._turns is not None:
            raise ContractError("lockstep was entered inside lockstep; one block is enough")
        self._enter("lockstep", ", begin")
        self._turns = turns = Turns(self._device)
        try:
            yield
            if self._forward_is_collective:
                self._join(turns)
            else:
                self._enter("lockstep", ", end")
        finally:
            self._turns = None

    def gather_for_metrics(self, data: Any, *, pad: float | None = None) -> Any:
        """What all ranks computed for a batch, on every rank, in the order of the dataset. Collective.

        With a loader of `unishard.dataloader` in an evaluation loop of `engine.batches`, the samples with which the last batches
        were filled up are left out.

        Args:
            data: Tensors with one row a sample, or lists of strings or numbers with one entry a sample, in dicts, lists and tuples.
                Ranks may have different numbers of rows. A tensor without dimensions, such as a mean loss, gives one entry a rank.
            pad: Value that fills up dimensions behind the first where they differ between ranks, such as the lengths of
                generated sequences; left out, they must be equal.

        Returns:
            The same containers; tensors are detached and on the device that they came from.

        Raises:
            ContractError: Something in `data` is neither; or it is not one row a sample where samples must be left out; or the
                engine is closed.
            RankMismatchError: The ranks hold different structures, dtypes or lengths.
        """
        self._require_open("gather_for_metrics")
        description = gather.describe(data, padded=pad is not None)
        self._enter("gather_for_metrics", f", {description}")
        return gather.gather(data, self._device, pad, self._tail)

    # -- inside -----------------------------------------------------------------------------------------------------------

    def _evaluate(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward or `generate` without a graph. Collective."""
        if self._turns is None:
            self._enter(kind)
        elif self._forward_is_collective:
            self._take_turn(self._turns, kind, (args, kwargs))
        return self._run(kind, (args, kwargs))

    def _run(self, kind: str, call: Call) -> Any:
        args, kwargs = call
        with torch.no_grad():
            return (self._forward if kind == "forward" else self._generate)(*args, **kwargs)

    def _take_turn(self, turns: Turns, kind: str | None, call: Call | None) -> tuple[str, Call] | None:
        self._enter("lockstep", f", turn {turns.taken + 1}")
        return turns.take(kind, call)

    def _join(self, turns: Turns) -> None:
        """Repeat calls until every rank has left the block; torch's random numbers go on as if nothing had been."""
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            while (turn := self._take_turn(turns, None, None)) is not None:
                self._run(*turn)

    def _mark_last(self, loader: Iterable[Any], batches: Iterable[Any]) -> Iterator[Any]:
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
