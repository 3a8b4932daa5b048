"""Find modules, parameters and gradient hooks that were added to a model after `prepare`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from unishard.engine.guards.guard import Guard, Looks
from unishard.engine.place import LoopPlace
from unishard.errors import ContractError


class AddedModules(Guard):
    """Refuses what the script adds to a prepared model, such as adapters or a new head.

    Without it: no engine trains or saves it, and a hook on a parameter is called with other gradients, or never.
    """

    looks = Looks.CLOSELY

    def __init__(self, model: nn.Module, packages: Collection[str], place: LoopPlace) -> None:
        """Remember the modules, and their parameters with their hooks.

        Args:
            model: The prepared one.
            packages: Whose hooks on parameters are the engine's.
            place: Where the loop is.
        """
        self._model, self._packages, self._place = model, packages, place
        self._parts = [*model.modules()]
        self._known = {id(part): dict(part.named_parameters(recurse=False)) for part in self._parts}
        self._hooks = {
            id(parameter): self._hooks_on(parameter) for known in self._known.values() for parameter in known.values()
        }

    def before_forward(self) -> None:
        """Look through the model.

        Raises:
            ContractError: A module, a parameter or a gradient hook is new.
        """
        for name, part in self._model.named_modules():
            known = self._known.get(id(part), {})
            for own, parameter in part.named_parameters(recurse=False):
                full_name = f"{name}{'.' if name else ''}{own}"
                if self._hooks_on(parameter) > self._hooks.get(id(parameter), 0):
                    raise ContractError(
                        f"parameter {full_name} got a gradient hook after unishard.prepare, which "
                        "engines that shard it call with other gradients, or never; remove it, and edit gradients with "
                        "engine.gradients.write between engine.backward and engine.step"
                    )
                if own in known and (parameter is known[own] or self._may_replace(known[own])):
                    continue
                addition = f"parameter {full_name}" if id(part) in self._known else f"module {name}"
                raise ContractError(
                    f"{addition} was added or replaced after unishard.prepare, so no engine trains or saves it; change "
                    "the model before prepare: get_peft_model, a new head, a resized embedding"
                )

    def _may_replace(self, parameter: Any) -> bool:
        """Whether FSDP2 may have put another tensor in the place of a shard."""
        return self._place.gathered and isinstance(parameter, DTensor)

    def _hooks_on(self, parameter: Any) -> int:
        """How many gradient hooks of others a parameter has, in private attributes of torch 2.13, as in
        `engine.model.facts`. A method of a builtin has no module, and may be the engine's.
        """
        kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
        hooks = [hook for kind in kinds for hook in (getattr(parameter, kind, None) or {}).values()]
        origins = (getattr(getattr(hook, "func", hook), "__module__", None) for hook in hooks)
        return sum(origin is not None and origin.partition(".")[0] not in self._packages for origin in origins)
