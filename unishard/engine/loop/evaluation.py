"""Evaluation: forwards without a graph, generation, loops of different lengths, and gathered metrics."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from unishard.contract.adapter import InferenceAdapter
from unishard.data.batches import to_device
from unishard.data.loader import ShareLoader
from unishard.data.sampler import ShareSampler
from unishard.distributed.dtypes import name_of
from unishard.distributed.nested_tensors import tensors_in
from unishard.engine.guards.inference_mode import as_no_grad, without_inference_mode
from unishard.engine.loop.buffers import Buffers
from unishard.engine.loop.call_order import CallOrder
from unishard.errors import ContractError, RankMismatchError
from unishard.failures.endings import naming_causes

# -- Gathers the ranks' results: tensors of unequal length, and lists of plain values, in nested containers --


def leaves_of(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Tensors, and lists with one plain value per sample, each with its path: `logits`, `spans[1]`.

    Raises:
        ContractError: The data contains something else.
    """
    if isinstance(data, Tensor) or _is_samples(data):
        yield path, data
    elif isinstance(data, Mapping):
        for key, value in data.items():
            yield from leaves_of(value, f"{path}.{key}" if path else str(key))
    elif isinstance(data, list | tuple):
        for index, value in enumerate(data):
            yield from leaves_of(value, f"{path}[{index}]")
    else:
        raise ContractError(
            "gather_for_metrics takes tensors and lists of strings or numbers, in dicts, lists and tuples, but "
            f"{path or 'it'} is a {type(data).__name__}; make it a tensor, or a list with one entry per sample"
        )


def _is_samples(data: Any) -> bool:
    return isinstance(data, list) and all(isinstance(value, str | bytes | int | float) for value in data)


def _describe(data: Any, *, padded: bool) -> str:
    """What must be the same on every rank: paths, dtypes, and all sizes except those that may differ."""
    parts = []
    for path, leaf in leaves_of(data):
        if isinstance(leaf, Tensor):
            lengths = ["*"] * leaf.dim() if padded else ["*", *map(str, leaf.shape[1:])][: leaf.dim()]
            parts.append(f"{path or 'tensor'}: {name_of(leaf.dtype)}[{', '.join(lengths)}]")
        else:
            parts.append(f"{path or 'values'}: list")
    return ", ".join(parts)


def _gather(data: Any, device: torch.device, pad: float | None, tail: tuple[int, int] | None) -> Any:
    """Concatenate the leaves of all ranks along the first dimension, in rank order, in the same containers. Collective.

    Zero-dimensional tensors become one entry per rank. The structure must be the same on every rank (see `describe`).

    Args:
        data: This rank's data.
        device: A device that the collective supports.
        pad: Fill value for dimensions after the first that differ between ranks.
        tail: Number of samples of all ranks, and how many of them to keep.

    Raises:
        ContractError: Samples are to be dropped, but a leaf does not have one row per sample.
    """

    def joined(leaf: Any) -> Any:
        gathered = _gather_tensor(leaf, device, pad) if isinstance(leaf, Tensor) else _gather_list(leaf)
        if tail is None or (isinstance(leaf, Tensor) and not leaf.dim()):
            return gathered
        samples, real = tail
        if len(gathered) != samples:
            raise ContractError(
                "gather_for_metrics cannot drop the samples that fill up the last batch: it got "
                f"{len(gathered)} rows for {samples} samples; pass one row per sample"
            )
        return gathered[:real]

    return _mapped(data, joined)


def _mapped(data: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(data, Tensor) or _is_samples(data):
        return change(data)
    if isinstance(data, Mapping):
        return {key: _mapped(value, change) for key, value in data.items()}
    make = getattr(type(data), "_make", type(data))  # a named tuple takes its fields one by one
    return make([_mapped(value, change) for value in data])


def _has_rows(data: Any, rows: int) -> bool:
    """Whether anything in gathered data has so many rows."""
    return any(len(leaf) == rows for _, leaf in leaves_of(data))


def _gather_list(values: list[Any]) -> list[Any]:
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, values)
    return [value for theirs in everyones for value in theirs]


def _gather_tensor(tensor: Tensor, device: torch.device, pad: float | None) -> Tensor:
    origin, tensor = tensor.device, tensor.detach().to(device)
    if not tensor.dim():
        tensor = tensor[None]
    shape = torch.tensor(tensor.shape, device=device)
    shapes = [torch.empty_like(shape) for _ in range(dist.get_world_size())]
    dist.all_gather(shapes, shape)
    lengths = [theirs.tolist() for theirs in shapes]
    largest = [max(sizes) for sizes in zip(*lengths, strict=True)]
    wide = _filled(tensor, [tensor.shape[0], *largest[1:]], pad)
    flat = _filled(wide, largest, 0).contiguous().view(-1)
    if not flat.numel():
        return wide.new_empty([sum(theirs[0] for theirs in lengths), *largest[1:]]).to(origin)
    mine = flat.view(torch.uint8)  # as bytes: the backend need not support the dtype
    everyones = [torch.empty_like(mine) for _ in lengths]
    dist.all_gather(everyones, mine)
    parts = [
        theirs.view(flat.dtype).view(largest)[: sizes[0]] for theirs, sizes in zip(everyones, lengths, strict=True)
    ]
    return torch.cat(parts).to(origin)


def _filled(tensor: Tensor, shape: list[int], value: float | None) -> Tensor:
    """Pad the tensor at the end of each dimension."""
    missing = [wanted - there for wanted, there in zip(shape, tensor.shape, strict=True)]
    if not any(missing):
        return tensor
    return functional.pad(tensor, [part for more in reversed(missing) for part in (0, more)], value=value)


# Run ranks with different numbers of forwards in lockstep: finished ranks replay their last call until every rank is
# done.

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""
_KINDS = ("forward", "generate")


class Lockstep:
    """The turns of one `lockstep` block."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: dict[str, Call] = {}
        self.taken = 0

    def take(self, kind: str | None, call: Call | None) -> tuple[str, Call] | None:
        """Take the next turn. Collective.

        Args:
            kind: What this rank calls; None if it has nothing left to call.
            call: The arguments.

        Returns:
            The call for this turn: this rank's own, or one to repeat; None when all ranks are done.

        Raises:
            RankMismatchError: On every rank: one rank calls the model and another one `generate`.
        """
        self.taken += 1
        if kind is not None and call is not None:
            self._last[kind] = call
        state = [0 if kind is None else 1 + _KINDS.index(kind), *(name in self._last for name in _KINDS)]
        rows = [torch.empty(len(state), dtype=torch.int64, device=self._device) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, torch.tensor(state, dtype=torch.int64, device=self._device))
        states = [row.tolist() for row in rows]
        callers = {number: [rank for rank, (called, *_) in enumerate(states) if called == number] for number in (1, 2)}
        if callers[1] and callers[2]:
            raise RankMismatchError(
                f"in turn {self.taken} of engine.lockstep ranks {callers[1]} call the model and ranks {callers[2]} "
                "call generate; use a separate block for each"
            )
        number = 1 if callers[1] else 2
        if not callers[number]:
            return None
        chosen = _KINDS[number - 1]
        if not all(has_call[number] for has_call in states):
            self._share_call(chosen, callers[number][0])
        return chosen, self._last[chosen]

    def _share_call(self, kind: str, source: int) -> None:
        """Share one rank's call with ranks that have none to repeat. Collective."""
        shared = [to_device(self._last[kind], torch.device("cpu")) if dist.get_rank() == source else None]
        dist.broadcast_object_list(shared, source)
        if kind not in self._last:
            self._last[kind] = to_device(shared[0], self._device)


class Evaluation:
    """Evaluation mode, the same on every engine. Methods implement those of `Engine` with the same names."""

    def __init__(self, adapter: InferenceAdapter, order: CallOrder, buffers: Buffers, *, trains: bool) -> None:
        self._adapter = adapter
        self._order = order
        self._buffers = buffers
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
        self._order.check_now("lockstep", ", begin")
        self.lockstep_open = lockstep = Lockstep(self._adapter.device)
        try:
            yield
            if self._adapter.forward_is_collective:
                self._join(lockstep)
            else:
                self._order.check_now("lockstep", ", end")
        finally:
            self.lockstep_open = None

    def of_module(self) -> Callable[..., Any] | None:
        """What `module.generate` is to be, since it needs the other ranks; None where it does not."""
        own = getattr(self._adapter.module, "generate", None)
        if not callable(own) or not self._adapter.forward_is_collective or dist.get_world_size() == 1:
            return None

        @functools.wraps(own)
        def generate(*args: Any, **kwargs: Any) -> Any:
            if self._running:
                return own(*args, **kwargs)
            with naming_causes(), as_no_grad():
                return self.generate(*args, **kwargs)

        return generate

    def gather_for_metrics(self, data: Any, *, pad: float | None) -> Any:
        """Gather what all ranks computed for a batch, in dataset order."""
        description = _describe(data, padded=pad is not None)
        self._order.check_now("gather_for_metrics", f", {description}")
        gathered = _gather(data, self._adapter.device, pad, self._tail)
        loader = ShareLoader.last_unfollowed and ShareLoader.last_unfollowed()
        if self._tail is None and loader and loader.at_repeated and _has_rows(gathered, loader.round):
            raise ContractError(
                f"gather_for_metrics has {loader.round} rows of the last batches, of which {loader.repeated} are of "
                "samples that fill them up: the unishard.dataloader is read without the engine, or in a generator "
                "around it; write `for batch in engine.batches(loader):`"
            )
        return gathered

    def run(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a forward or `generate` without a graph. Collective."""
        if self.lockstep_open is None:
            self._buffers.equalize_for_evaluation(kind)
            self._order.check_sampled(kind)
        elif self._adapter.forward_is_collective:
            self._take_turn(self.lockstep_open, kind, (args, kwargs))
        return self._run(kind, (args, kwargs))

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
            with self._order.forwarding(), nullcontext() if graph else torch.no_grad():
                return (self._adapter.forward if kind == "forward" else self._adapter.generate)(*args, **kwargs)
        finally:
            self._running = False

    def _take_turn(self, lockstep: Lockstep, kind: str | None, call: Call | None) -> tuple[str, Call] | None:
        self._order.check_sampled("lockstep", f", turn {lockstep.taken + 1}")
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
