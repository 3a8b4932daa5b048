"""The state of an optimizer in a file, piece by piece in memory while it steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unishard.contract.optimizer_state import keep_state, keys_of
from unishard.distributed.nested_optimizers import HOOKS
from unishard.errors import BackendError
from unishard.nvme.file_space import Cut, FileSpace
from unishard.nvme.rank_file import RankFile
from unishard.nvme.streams import Streams


class StateInFile:
    """Lets an element-wise optimizer step by pieces, whose state is read before and written afterwards.

    Between steps its state has tensors that are mapped on the file, so what reads or writes them needs to know nothing.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, tensors: Sequence[Tensor], *, pin_memory: bool) -> None:
        """Lay the state out; nothing is allocated.

        Args:
            optimizer: Has not stepped yet; each element of an update depends on the element of the state.
            tensors: All that it will step. What lies on a device comes to the host piece by piece, and goes back.
            pin_memory: Whether page-locked memory is used for that.
        """
        self._optimizer: Any = optimizer
        self._pin_memory = pin_memory
        spaces: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            spaces[tensor.dtype].append(tensor)
        self._spaces: list[FileSpace] = []
        for each in spaces.values():
            keys: dict[str, torch.dtype] = {}
            for group in optimizer.param_groups:
                keys |= keys_of(optimizer, group, each[0]).tensors
            if keys:
                self._spaces.append(FileSpace(each, keys))
        self._streams: list[Streams] = []

    @property
    def nbytes(self) -> int:
        """Of the state in the file."""
        return sum(space.nbytes for space in self._spaces)

    def put_into(self, file: RankFile, start: int) -> None:
        """Take the bytes of a file from one on, and step by pieces from now on."""
        if not self._spaces:  # such as SGD without momentum
            return
        for space in self._spaces:
            self._streams.append(space.put_into(file, start))
            start += space.nbytes
        keep_state(self._optimizer, partial(_memory_in, self._spaces))
        inner = self._optimizer.step

        @wraps(inner)  # with the mark of a scheduler
        def step(optimizer: Any, closure: Any = None) -> None:
            self._step(inner)

        self._optimizer.step = MethodType(torch.optim.Optimizer.profile_hook_step(step), self._optimizer)

    def close(self) -> None:
        """End the threads."""
        for streams in self._streams:
            streams.close()

    @torch.no_grad()
    def _step(self, inner: Callable[[], Any]) -> None:
        stepped = [each for group in self._optimizer.param_groups for each in group["params"] if each.grad is not None]
        with self._one_update():
            for space, streams in zip(self._spaces, self._streams, strict=True):
                self._step_in(space, streams, [each for each in stepped if each in space], inner)

    @contextmanager
    def _one_update(self) -> Iterator[None]:
        """Several calls that are one: the hooks on the step are called around all of them."""
        hooks = [getattr(self._optimizer, name) for name in HOOKS]
        held = [dict(each) for each in hooks]
        for each in hooks:
            each.clear()
        try:
            yield
        finally:
            for each, found in zip(hooks, held, strict=True):
                each.update(found)

    def _step_in(self, space: FileSpace, streams: Streams, tensors: Sequence[Tensor], inner: Callable[[], Any]) -> None:
        optimizer = self._optimizer
        state, groups = optimizer.state, optimizer.param_groups
        left: dict[Tensor, _Left] = {}

        def step(cuts: Sequence[Cut], held: Mapping[str, Tensor]) -> None:
            views = {cut.tensor: self._view(cut) for cut in cuts}
            optimizer.param_groups = [*_groups_of(groups, views)]
            optimizer.state = defaultdict(dict)
            for cut in cuts:
                if entry := state.get(cut.tensor):
                    optimizer.state[views[cut.tensor]] = _entry(space, entry, cut, held)
            inner()
            for cut in cuts:
                view = views[cut.tensor]
                left[cut.tensor] = _finish(optimizer.state[view], cut, held)
                if view.device != cut.tensor.device:
                    _weights(cut).copy_(view)

        try:
            streams.move(space.cuts(tensors), step)
        finally:
            optimizer.param_groups, optimizer.state = groups, state
        for tensor, (numbers, keys) in left.items():
            state[tensor].update(numbers)
            for key in keys:
                if key not in state[tensor] or not space.holds(key, tensor, state[tensor][key]):
                    state[tensor][key] = space.state(key, tensor)

    def _view(self, cut: Cut) -> nn.Parameter:
        """The part of a tensor and of its gradient, in host memory."""
        assert cut.tensor.grad is not None
        view = nn.Parameter(self._on_host(_weights(cut)))
        view.grad = self._on_host(cut.tensor.grad.reshape(-1)[cut.start : cut.stop])
        return view

    def _on_host(self, part: Tensor) -> Tensor:
        if part.device.type == "cpu":
            return part
        return torch.empty(part.shape, dtype=part.dtype, pin_memory=self._pin_memory).copy_(part)


def _memory_in(spaces: Sequence[FileSpace], key: str, like: Tensor) -> Tensor | None:
    space = next((each for each in spaces if like in each), None)
    return None if space is None else space.state(key, like)


class _Left(NamedTuple):
    """What a call has left of the state of a part."""

    numbers: Mapping[str, Any]
    keys: Sequence[str]
    """Of tensors, which are in the piece."""


def _groups_of(groups: Iterable[dict[str, Any]], views: Mapping[Tensor, Tensor]) -> Iterator[dict[str, Any]]:
    """The groups that have some of these tensors, with the views of them."""
    for group in groups:
        if own := [views[each] for each in group["params"] if each in views]:
            yield group | {"params": own}


def _weights(cut: Cut) -> Tensor:
    return cut.tensor.detach().view(-1)[cut.start : cut.stop]


def _entry(space: FileSpace, entry: Mapping[str, Any], cut: Cut, held: Mapping[str, Tensor]) -> dict[str, Any]:
    """The state of a part: memory of the piece, and copies of numbers, which each call moves on by one."""
    values: dict[str, Any] = {}
    for key, value in entry.items():
        if key not in held:
            values[key] = value.to("cpu", copy=True) if isinstance(value, Tensor) else value
            continue
        values[key] = _part(held[key], cut)
        if not space.holds(key, cut.tensor, value):  # made by the optimizer's constructor, or by others
            values[key].copy_(value.reshape(-1)[cut.start : cut.stop])
    return values


def _finish(entry: Mapping[str, Any], cut: Cut, held: Mapping[str, Tensor]) -> _Left:
    """Put tensors that the call has made into the piece.

    Raises:
        BackendError: There is a tensor for which the file has no region.
    """
    numbers = {key: value for key, value in entry.items() if key not in held or value is None}
    for key, value in numbers.items():
        if isinstance(value, Tensor) and value.numel() > 1:
            raise BackendError(
                f"offload.optimizer: nvme has no file for {key!r}, which the optimizer has begun to keep for each "
                "element; set its options before unishard.prepare, or offload.optimizer to cpu"
            )
    keys = [key for key in held if entry.get(key) is not None]
    for key in keys:
        part = _part(held[key], cut)
        if entry[key].data_ptr() != part.data_ptr():
            part.copy_(entry[key])
    return _Left(numbers, keys)


def _part(piece: Tensor, cut: Cut) -> Tensor:
    return piece[cut.at : cut.at + cut.stop - cut.start]
