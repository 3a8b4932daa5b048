"""This rank's tensors of a run, which checkpoints are written from and read into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from unishard.checkpoint import tensor_names
from unishard.checkpoint.export.sources import persistent_buffers
from unishard.checkpoint.tensor_reader import Tensors
from unishard.contract.adapter import ShardedModel
from unishard.contract.optimizer_state import OptimizerState
from unishard.distributed.lazy_shards import LazyShard, lazy_shard_of
from unishard.distributed.shards import Shard
from unishard.engine.state.average_shards import AverageShards
from unishard.engine.state.eight_bit_state import eight_bit_state_of


class StateTensors:
    """This rank's shards of parameters, buffers and optimizer state, by name."""

    def __init__(self, adapter: ShardedModel) -> None:
        """Collect the parameter names after sharding.

        Args:
            adapter: The model's adapter.
        """
        self._adapter = adapter
        updates = adapter.updates
        self.eight_bit = eight_bit_state_of(updates)
        """The optimizer's state, if it is AdamW with moments of 8 bits."""
        self.optimizer_state: OptimizerState | None = (
            self.eight_bit or updates.optimizer_state if updates is not None else None
        )
        self._module = adapter.module
        self.named = dict(adapter.module.named_parameters(remove_duplicate=False))
        """The engine's parameters by the user's names; a tied parameter under each of its names."""
        self._each = [*adapter.module.named_parameters()]
        self.average: AverageShards | None = None
        """The moving average of the weights, if the user keeps one."""
        self.saved_average: Tensors | None = None
        """The loaded checkpoint, if it has a moving average for which the user has not asked yet."""
        self._prepared = {name for name, parameter in self.each() if parameter.requires_grad}

    def each(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter once, under its first name."""
        return iter(self._each)

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters of the optimizer, by their first names."""
        return {name: parameter for name, parameter in self.each() if name in self._prepared}

    def model_shards(self, merged: Mapping[str, Tensor] | None = None) -> dict[str, Shard]:
        """Parameters and persistent buffers, each once, by checkpoint name. Buffers are full on every rank.

        Args:
            merged: Values of buffers by name, in the place of this rank's own.
        """
        buffers = self.buffers() | {**(merged or {})}
        shards = {
            tensor_names.PARAMETERS + name: self._adapter.master_shard(parameter) for name, parameter in self.each()
        }
        ties = self.ties()
        return shards | {
            tensor_names.PARAMETERS + name: Shard(buffer.shape, buffer)
            for name, buffer in buffers.items()
            if name not in ties
        }

    def optimizer_shards(self) -> dict[str, Shard]:
        """The optimizer's state, by checkpoint name."""
        return {
            tensor_names.of_optimizer(name, key): shard
            for name, parameter in self.trained().items()
            for key, shard in self.optimizer_shards_of(parameter).items()
        }

    def optimizer_shards_of(self, parameter: nn.Parameter) -> dict[str, Shard]:
        """The optimizer's state of one parameter, by the optimizer's own keys."""
        return {} if self.optimizer_state is None else self.optimizer_state.shards(parameter)

    def average_shards(self) -> dict[str, Shard]:
        """The moving average, by checkpoint name."""
        return {} if self.average is None else self.average.to_save()

    def by_name(self, merged: Mapping[str, Tensor] | None = None) -> dict[str, Shard]:
        """Parameters and persistent buffers, by name in the module; `merged` as in `model_shards`."""
        return {name.removeprefix(tensor_names.PARAMETERS): shard for name, shard in self.model_shards(merged).items()}

    def to_export(self, merged: Mapping[str, Tensor] | None = None) -> dict[str, LazyShard]:
        """The same to be written, see `by_name`."""
        return {name: lazy_shard_of(shard) for name, shard in self.by_name(merged).items()}

    def buffers(self) -> dict[str, Tensor]:
        """The persistent buffers, under every name."""
        return persistent_buffers(self._module)

    def ties(self) -> dict[str, str]:
        """Map further names of parameters and persistent buffers to their first name."""
        first: dict[int, str] = {}
        named = {**self.named, **self.buffers()}
        return {name: first[id(tensor)] for name, tensor in named.items() if first.setdefault(id(tensor), name) != name}
