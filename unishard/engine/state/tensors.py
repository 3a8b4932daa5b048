"""This rank's tensors of a run, which checkpoints are written from and read into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from unishard.checkpoint import manifest
from unishard.checkpoint.export.sources import persistent_buffers
from unishard.checkpoint.tensor_reader import ReadRequest, Tensors
from unishard.contract.adapter import EngineAdapter, InferenceAdapter
from unishard.distributed.shards import LazyShard, Shard, lazy_shard_of

# -- This rank's shards of a moving average of the master weights ----------------------------------


class AverageShards:
    """This rank's shards of a moving average, in fp32."""

    @torch.no_grad()
    def __init__(self, decay: float, live: Mapping[str, Shard]) -> None:
        """Start at the current master weights.

        Args:
            decay: The part of the average that an update keeps.
            live: This rank's shards of the master weights, by the first names of the parameters.
        """
        self._rest = 1 - decay
        self._average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self.live = [shard.values for shard in live.values()]
        """The master weights."""
        self.averages = [torch.empty_like(values, dtype=torch.float32).copy_(values) for values in self.live]
        """Their averages, in the same order."""
        self.by_name = {
            name: shard._replace(values=average)
            for (name, shard), average in zip(live.items(), self.averages, strict=True)
        }
        """The averages, by the first names of the parameters."""

    @torch.no_grad()
    def update(self) -> None:
        """Average in the master weights after an update. Not collective."""
        if all(values.dtype == torch.float32 for values in self.live):
            self._average(self.averages, self.live, 0)
            return
        for average, values in zip(self.averages, self.live, strict=True):
            average.lerp_(values.float(), self._rest)

    def to_save(self) -> dict[str, Shard]:
        """By checkpoint name."""
        return {manifest.AVERAGES + name: shard for name, shard in self.by_name.items()}

    @torch.no_grad()
    def read(self, tensors: Tensors) -> int:
        """Read the averages of a checkpoint; those that it lacks start at the current master weights.

        Returns:
            How many it lacks.
        """
        for average, values in zip(self.averages, self.live, strict=True):
            average.copy_(values)
        found = self._found(tensors)
        tensors.read(ReadRequest(name, start, shard.values.view(-1)) for name, (start, shard) in found.items())
        return len(self.by_name) - len(found)

    def require(self, tensors: Tensors) -> None:
        """Check that what `read` reads is there. Reads no element.

        Raises:
            CheckpointError: It is incomplete.
        """
        for name, (start, shard) in self._found(tensors).items():
            tensors.require(name, shard.shape, start, start + shard.values.numel())

    def _found(self, tensors: Tensors) -> dict[str, tuple[int, Shard]]:
        """By name in the checkpoint: where each shard begins, and the shard."""
        return {
            name: (0 if shard.group is None else shard.start, shard)
            for name, shard in self.to_save().items()
            if name in tensors
        }


def has_average(tensors: Tensors) -> bool:
    """Whether a checkpoint has a moving average."""
    return any(name.startswith(manifest.AVERAGES) for name in tensors)


def resume_average(average: AverageShards, tensors: Tensors) -> Iterator[str]:
    """Resume the moving average of a checkpoint.

    Yields:
        Notes about what differs.
    """
    lacking = average.read(tensors)
    if lacking:
        which = (
            f"moving averages of {lacking} parameters" if has_average(tensors) else "a moving average of the weights"
        )
        yield f"it lacks {which}; they start at the loaded weights"


class StateTensors:
    """This rank's shards of parameters, buffers and optimizer state, by name."""

    def __init__(self, adapter: InferenceAdapter, training: EngineAdapter | None) -> None:
        """Collect the parameter names after sharding.

        Args:
            adapter: The model's adapter.
            training: The same adapter if there is an optimizer, else None.
        """
        self._adapter = adapter
        self._training = training
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
        shards = {manifest.PARAMETERS + name: self._adapter.master_shard(parameter) for name, parameter in self.each()}
        ties = self.ties()
        return shards | {
            manifest.PARAMETERS + name: Shard(buffer.shape, buffer)
            for name, buffer in buffers.items()
            if name not in ties
        }

    def optimizer_shards(self) -> dict[str, Shard]:
        """The optimizer's state, by checkpoint name."""
        return {
            manifest.of_optimizer(name, key): shard
            for name, parameter in self.trained().items()
            for key, shard in self.optimizer_shards_of(parameter).items()
        }

    def optimizer_shards_of(self, parameter: nn.Parameter) -> dict[str, Shard]:
        """The optimizer's state of one parameter, by the optimizer's own keys."""
        return {} if self._training is None else self._training.optimizer_shards(parameter)

    def average_shards(self) -> dict[str, Shard]:
        """The moving average, by checkpoint name."""
        return {} if self.average is None else self.average.to_save()

    def to_export(self, merged: Mapping[str, Tensor] | None = None) -> dict[str, LazyShard]:
        """Parameters and persistent buffers, by name in the module; `merged` as in `model_shards`."""
        return {
            name.removeprefix(manifest.PARAMETERS): lazy_shard_of(shard)
            for name, shard in self.model_shards(merged).items()
        }

    def buffers(self) -> dict[str, Tensor]:
        """The persistent buffers, under every name."""
        return persistent_buffers(self._module)

    def ties(self) -> dict[str, str]:
        """Map further names of parameters and persistent buffers to their first name."""
        first: dict[int, str] = {}
        named = {**self.named, **self.buffers()}
        return {name: first[id(tensor)] for name, tensor in named.items() if first.setdefault(id(tensor), name) != name}
