"""Moments of 8 bits in checkpoints: under the names and in the dtype that torch's AdamW has for them.

So any engine, number of ranks and AdamW reads them. What is read in the same blocks again is the same to the bit, see
`unishard.eight_bit.codes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unishard.checkpoint import tensor_names
from unishard.checkpoint.tensor_reader import ReadRequest
from unishard.contract.adapter import Updates
from unishard.contract.optimizer_state import StateSpec
from unishard.distributed.lazy_shards import LazyShard
from unishard.distributed.on_ranks import ranks_of
from unishard.distributed.shards import Shard
from unishard.eight_bit.adamw import AdamW8bit
from unishard.eight_bit.moments import MOMENTS, Moments8bit
from unishard.engine.state.part import CheckpointSource, Part, Saved

_NUMBER = "step"


class EightBitState(Part):
    """An `OptimizerState` of `AdamW8bit`: small parameters have live tensors, the others codes that are made on the
    way.
    """

    def __init__(self, updates: Updates, optimizer: AdamW8bit) -> None:
        """Hold the optimizer, which knows how its parameters are sharded."""
        self._shard_of = updates.model.master_shard
        self._optimizer = optimizer
        self._names = {parameter: name for name, parameter in updates.model.module.named_parameters()}
        self._rounded = (0, 0)
        """Elements that have another value than in the loaded checkpoint, and all of them."""

    def shards(self, parameter: nn.Parameter) -> dict[str, Shard]:
        """As in `OptimizerState`, without moments of 8 bits."""
        name = self._names[parameter]
        if small := self._optimizer.small.get(name):
            place = self._shard_of(parameter)
            shape = place.shape if place.group is None else (-1,)
            shards = {key: place._replace(values=small[key].view(shape)) for key in MOMENTS}
            return shards | {_NUMBER: _number(float(small[_NUMBER]))}
        moments = self._optimizer.moments.get(name)
        return {} if moments is None else {_NUMBER: _number(moments.step)}

    def make(self, specs: Mapping[nn.Parameter, StateSpec]) -> None:
        """As in `OptimizerState`."""
        optimizer = self._optimizer
        optimizer.moments.clear()
        optimizer.small.clear()
        for parameter, spec in specs.items():
            name, step, shard = self._names[parameter], spec.numbers[_NUMBER], self._shard_of(parameter)
            if not shard.interval:
                continue
            if self.is_8bit(parameter):
                optimizer.moments_of(name, shard.interval, shard.values.device, int(step))
            else:
                optimizer.small_of(name, shard.values.reshape(-1))[_NUMBER].fill_(step)

    def is_8bit(self, parameter: nn.Parameter) -> bool:
        """Whether moments of a parameter have 8 bits; the same on all ranks."""
        return not self._optimizer.is_small(self._names[parameter], self._shard_of(parameter).shape.numel())

    def saved(self, group: dist.ProcessGroup) -> Saved:
        """As in `Part`: this rank's moments of 8 bits in fp32, made of codes as they are read."""
        return Saved(dict(self._lazy()), {})

    def read(self, source: CheckpointSource) -> None:
        """As in `Part`: those that `make` has made, one after another."""
        changed = elements = 0
        for name, moments, shard in self._moments():
            for key in MOMENTS:
                values = torch.empty(len(shard.interval))
                stored = tensor_names.of_optimizer(name, key)
                source.tensors.read([ReadRequest(stored, shard.interval.start, values, shard.order)])
                changed += moments.write(key, values)
                elements += len(values)
        self._rounded = changed, elements

    def resume(self, source: CheckpointSource, group: dist.ProcessGroup) -> Iterator[str]:
        """As in `Part`."""
        changed, elements = (sum(each) for each in zip(*ranks_of(group).gather(self._rounded), strict=True))
        if changed:
            yield (
                f"{changed:,} of {elements:,} moments are rounded to 8 bits anew: they were saved by AdamW in fp32, or "
                "from shards that end elsewhere in a block of 256 elements"
            )

    def _moments(self) -> Iterator[tuple[str, Moments8bit, Shard]]:
        """Those of 8 bits, beside the weights."""
        for parameter, name in self._names.items():
            if name in self._optimizer.moments:
                yield name, self._optimizer.moments[name], self._shard_of(parameter)

    def _lazy(self) -> Iterator[tuple[str, LazyShard]]:
        for name, moments, shard in self._moments():
            begin, end = shard.interval.start, shard.interval.stop
            for key in MOMENTS:
                read = partial(_read, moments, key, begin)
                yield (
                    tensor_names.of_optimizer(name, key),
                    LazyShard(shard.shape, torch.float32, begin, end, read, shard.order),
                )


def eight_bit_state_of(updates: Updates | None) -> EightBitState | None:
    """That of an engine's optimizer; None for other optimizers."""
    if updates is None or not isinstance(updates.torch_optimizer, AdamW8bit):
        return None
    return EightBitState(updates, updates.torch_optimizer)


def _number(value: float) -> Shard:
    return Shard(torch.Size(()), torch.tensor(value, dtype=torch.float32))


def _read(moments: Moments8bit, key: str, start: int, begin: int, end: int) -> Tensor:
    return moments.read(key, begin - start, end - start)
