"""An exponential moving average of the master weights, in the shards of the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from unishard.checkpoint.tensor_reader import Tensors
from unishard.contract.adapter import ShardedModel
from unishard.distributed import process_group
from unishard.distributed.on_ranks import on_all
from unishard.distributed.shards import full_tensor
from unishard.engine.entering import entered
from unishard.engine.guards.inference_mode import without_inference_mode
from unishard.engine.loop.call_order import CallOrder
from unishard.engine.place import Phase
from unishard.engine.state.average_shards import AverageShards
from unishard.engine.state.tensors import StateTensors
from unishard.errors import ContractError

_logger = logging.getLogger("unishard")


@torch.no_grad()
def begin_average(
    decay: float, adapter: ShardedModel, tensors: StateTensors, order: CallOrder
) -> tuple[MovingAverage, Callable[[], None]]:
    """Begin a moving average of the weights that train. Collective.

    Args:
        decay: As in `Weights.average`.
        adapter: The sharded model.
        tensors: This rank's tensors, which the average joins.
        order: The engine's position in the loop.

    Returns:
        The average, and what to call after each update.

    Raises:
        CheckpointError: On every rank: the average of the loaded checkpoint cannot be read.
        ContractError: As in `Weights.average`.
    """
    order.require("weights.average")
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay <= 1:
        raise ContractError(f"weights.average: decay must be a number from 0 to 1, such as 0.999, got {decay!r}")
    if tensors.average is not None:
        raise ContractError("weights.average was called before; keep what it returned")
    order.ranks.check_now("weights.average", f", {decay}")
    adapter.reshard_all()
    masters = {name: adapter.master_shard(parameter) for name, parameter in tensors.trained().items()}
    shards = AverageShards(decay, masters)
    _resume(shards, tensors.saved_average)
    tensors.average, tensors.saved_average = shards, None
    return MovingAverage(decay, shards, adapter, order), shards.update


def _resume(shards: AverageShards, saved: Tensors | None) -> None:
    """Read the average of a checkpoint that was loaded before, such as by `prepare`. Collective."""
    if saved is None:
        return
    group = process_group.host_group()
    on_all(group, lambda: shards.require(saved))
    note = on_all(group, lambda: shards.read(saved))
    if note and dist.get_rank() == 0:
        _logger.warning("%s: %s", saved.folder, note)


@entered
class MovingAverage:
    """An exponential moving average of the weights that train.

    Created by `Weights.average`; the engine updates, saves and loads it.
    """

    def __init__(self, decay: float, shards: AverageShards, adapter: ShardedModel, order: CallOrder) -> None:
        """Called by `Weights.average`."""
        self.decay = decay
        """The part of the average that an update keeps."""
        self._shards = shards
        self._adapter = adapter
        self._order = order

    @torch.no_grad()
    def read(self, name: str) -> Tensor:
        """Read the average of a parameter, at any time. Collective.

        Args:
            name: Name in `module.named_parameters()` of a parameter that was trainable in `prepare`.

        Returns:
            A full fp32 copy on `engine.device`.

        Raises:
            ContractError: There is no such parameter, or the engine is closed.
        """
        self._order.require_open("average.read")
        if name not in self._shards.by_name:
            raise ContractError(
                f"average.read: {name!r} is not the first name of a parameter that was trainable in prepare"
            )
        self._order.ranks.check_now("average.read", f", {name}")
        return full_tensor(self._shards.by_name[name], self._adapter.device)

    @without_inference_mode
    @contextmanager
    def weights(self) -> Iterator[None]:
        """Use the averages as the model's weights inside the block, to evaluate, generate, or export them. Collective.

        Frozen parameters and buffers stay those of the model. On exit the master weights are put back, bit for bit;
        until then a copy of this rank's shards of them is kept.

        Raises:
            ContractError: Inside an accumulation window, while a forward waits for its backward, inside `frozen` or
                another such block,
                or on a closed engine. Inside the block: a forward in training mode, and calls that save, load or edit
                    weights.
        """
        order = self._order
        order.require("average.weights")
        order.ranks.check_now("average.weights")
        kept = [values.clone() for values in self._shards.live]
        self._write(self._shards.averages)
        try:
            with order.blocks.inside("averaged"):
                yield
        finally:
            if order.place.phase is not Phase.CLOSED:
                order.ranks.check_now("average.weights", ", at the end of the block")
                self._write(kept)

    @torch.no_grad()
    def _write(self, weights: list[Tensor]) -> None:
        self._adapter.reshard_all()
        self._order.place.wrote()
        for values, written in zip(self._shards.live, weights, strict=True):
            values.copy_(written)
        self._adapter.weights_written()
