"""Parameters that every rank holds whole at all times (`sharding.replicate`): at stage 3 they stay gathered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from torch import nn

from unishard.contract.kit.replicated import is_replicated
from unishard_deepspeed.cases.case import ZeroCase
from unishard_deepspeed.private.partitioned import free_never, gather, remove_hooks


@final
class PersistentParameters(ZeroCase):
    """Those that DeepSpeed partitions."""

    def __init__(self, optimizer: Any, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        """Keep them from being freed, once they are gathered.

        Modules that hold no others are entered without DeepSpeed's hooks, which compare between ranks what is entered.

        Args:
            optimizer: DeepSpeed's, which without training is its `DeepSpeedZeRoOffload`.
            model: Given to DeepSpeed already.
            parameters: The parameters.
        """
        self._parameters = [*parameters]
        whole = [module for module in model.modules() if _holds_no_other(module)]
        remove_hooks(optimizer, [inner for module in whole for inner in module.modules()])
        free_never(parameters)

    def partitioned(self) -> None:
        """Gather them again."""
        gather(self._parameters)

    def end_window(self, *, skipped: bool) -> None:
        """Gather them: an update partitions all."""
        self.partitioned()


def _holds_no_other(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and all(map(is_replicated, parameters))
