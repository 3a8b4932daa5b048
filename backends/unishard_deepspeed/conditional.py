"""Modules that a rank may leave out in a micro-batch: gathered and reduced on every rank all the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from unishard.engine.model.units import Unit
from unishard_deepspeed.patches.optimizer_kind import Kind
from unishard_deepspeed.patches.reduction import drop, gather, reduce_last, without_gathering

__all__ = ["ConditionalModules"]


class ConditionalModules:
    """The whole units of a model that DeepSpeed runs. Each method is collective."""

    def __init__(self, engine: Any, whole: Sequence[Unit], units: Sequence[str], kind: Kind) -> None:
        self._kind = kind
        self._optimizer = engine.optimizer
        self.parameters = [parameter for unit in whole for parameter in unit.module.parameters() if parameter.requires_grad]
        """All that are trained, in the order of the model."""
        loose = [unit.module for unit in whole if not any(unit.name.startswith(f"{name}.") for name in units)]
        self._gathered: list[nn.Parameter] = []
        """At stage 3 those in no leaf module, which DeepSpeed would gather module by module on the ranks that enter it."""
        if loose and kind == "stage-3":
            self._gathered = list(dict.fromkeys(parameter for module in loose for parameter in module.parameters()))
            without_gathering(engine.optimizer, [part for module in loose for part in module.modules()])

    def reduce_last(self) -> None:
        """Reduce their gradients in one order on every rank, when backward ends; where one is missing it is zero."""
        if self.parameters:
            reduce_last(self._optimizer, self.parameters, self._kind)

    def gather(self) -> None:
        """Before each forward: gather what no hook gathers."""
        if self._gathered:
            gather(self._gathered)

    def drop(self) -> None:
        """After each backward: keep this rank's part alone."""
        if self._gathered:
            drop(self._gathered)
