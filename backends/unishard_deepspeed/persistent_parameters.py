"""Parameters that every rank holds whole at all times (`sharding.replicate`): at stage 3 they stay gathered."""

from __future__ import annotations

from typing import Any

from torch import nn

from unishard.contract.kit.replicated import is_replicated
from unishard_deepspeed.private.partitioned import free_never, gather, is_partitioned, remove_hooks


class PersistentParameters:
    """The replicated parameters of a model under DeepSpeed. Below stage 3 all parameters are whole."""

    def __init__(self, optimizer: Any, model: nn.Module) -> None:
        """Keep them from being freed, once they are gathered.

        Modules that hold no others are entered without DeepSpeed's hooks, which compare between ranks what is entered.

        Args:
            optimizer: DeepSpeed's, which without training is its `DeepSpeedZeRoOffload`.
            model: Given to DeepSpeed already.
        """
        replicated = [parameter for parameter in model.parameters() if is_replicated(parameter)]
        self.trained = [parameter for parameter in replicated if parameter.requires_grad]
        """Those that train, in model order."""
        self.gathered = [*filter(is_partitioned, replicated)]
        """Those that would be sharded."""
        if self.gathered:
            whole = [module for module in model.modules() if _holds_no_other(module)]
            remove_hooks(optimizer, [inner for module in whole for inner in module.modules()])
            free_never(self.gathered)

    def gather(self) -> None:
        """Gather those that DeepSpeed has partitioned, as before each update. Collective."""
        if self.gathered:
            gather(self.gathered)


def _holds_no_other(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and all(map(is_replicated, parameters))
