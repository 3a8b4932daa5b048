"""Optimizers that are told how their parameters are sharded, and step the shards as plain tensors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class ShardOptimizer(torch.optim.Optimizer):
    """An optimizer whose update depends on where a shard lies in its parameter, or on the rest of the parameter.

    An engine tells it after sharding; until then it may not know what it steps.
    """

    steps_late = False
    """Whether the last call of `step` in an update changes what was stepped in the others, too."""

    @abstractmethod
    def first_state(self, options: Mapping[str, Any], tensor: Tensor) -> dict[str, Any]:
        """The state that the first step creates for a tensor, as a checkpoint has it; no step is made.

        Args:
            options: Of the tensor's group.
            tensor: What is stepped.
        """
