"""The state of an engine's optimizer by the model's parameters, whatever it steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from unishard.contract.adapter import Updates
from unishard.distributed.nested_optimizers import optimizers_in
from unishard.matrices.whole_tensors import WholeTensors


class StateByParameter(Mapping[nn.Parameter, dict[str, Any]]):
    """What this rank holds of each parameter's state: live memory, but for numbers where ZeRO steps flat tensors.

    As torch's, it is empty of a parameter that was never updated.
    """

    def __init__(self, updates: Updates) -> None:
        self._updates = updates
        self._names = {parameter: name for name, parameter in updates.model.module.named_parameters()}

    def __getitem__(self, parameter: nn.Parameter) -> dict[str, Any]:
        optimizer: Any = self._updates.torch_optimizer
        if parameter in optimizer.state:
            found: dict[str, Any] = optimizer.state[parameter]
            return found
        name = self._names[parameter]
        if isinstance(optimizer, WholeTensors):
            return next(iter(optimizer.state_of(name).values()), {})
        return {key: shard.values for key, shard in self._updates.optimizer_state.shards(parameter).items()}

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._names and bool(self[parameter])  # type: ignore[index]

    def __iter__(self) -> Iterator[nn.Parameter]:
        return (parameter for parameter in self._names if parameter in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def clear(self) -> None:
        """Forget the state of all parameters."""
        optimizer: Any = self._updates.torch_optimizer
        for each in optimizers_in(optimizer.given if isinstance(optimizer, WholeTensors) else optimizer):
            each.state.clear()
