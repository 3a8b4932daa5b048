"""Find parameters that the script unfreezes although they were frozen in `prepare`."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn

from unishard.engine.guards.guard import Guard, Looks
from unishard.errors import ContractError
from unishard.failures.compared_call import ComparedCall


class LateUnfreezing(Guard):
    """Refuses `requires_grad_(True)` on what has no master weight.

    Without it: no engine trains the parameter, though it has a gradient.
    """

    looks = Looks.CLOSELY

    def __init__(self, module: nn.Module, trainable: Collection[str]) -> None:
        """Look at all parameters.

        Args:
            module: The prepared model.
            trainable: The names of those that were trainable in `prepare`.
        """
        self._module, self._trainable = module, trainable

    def before_backward(self, loss: Tensor, call: ComparedCall) -> None:
        """Raise ContractError if such a parameter requires a gradient."""
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad and name not in self._trainable:
                raise never_trained(name)


def never_trained(name: str) -> ContractError:
    """Of a parameter that was frozen in `prepare`."""
    return ContractError(
        f"{name} was frozen when the model was prepared, so it has no fp32 master weight and is not in the optimizer; "
        "leave it trainable in prepare, and call engine.weights.set_trainable(..., False) until you want to train it"
    )
