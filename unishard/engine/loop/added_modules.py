"""Find modules and parameters that were added to a model after `prepare`, which no engine trains or saves."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor

from unishard.errors import ContractError


class AddedModules:
    """Refuses what the user adds to a prepared model, such as adapters or a new head."""

    def __init__(self, model: nn.Module) -> None:
        """Remember the modules and their parameters."""
        self._model = model
        self._known = {part: dict(part.named_parameters(recurse=False)) for part in model.modules()}

    def refuse(self, *, gathered: bool) -> None:
        """Look through the model.

        Args:
            gathered: Whether weights were gathered, so that FSDP2 may have put them in the place of a shard.

        Raises:
            ContractError: A module or a parameter is new.
        """
        for name, part in self._model.named_modules():
            known = self._known.get(part, {})
            for own, parameter in part.named_parameters(recurse=False):
                if own in known and (parameter is known[own] or (gathered and isinstance(known[own], DTensor))):
                    continue
                what = f"parameter {name}{'.' if name else ''}{own}" if part in self._known else f"module {name}"
                raise ContractError(
                    f"{what} was added or replaced after unishard.prepare, so no engine trains or saves it; change the "
                    "model before prepare: get_peft_model, a new head, a resized embedding"
                )
