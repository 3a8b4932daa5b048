"""Conditional modules: those that a rank may skip in a micro-batch, but that every rank gathers and reduces."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from unishard.contract.units import Unit
from unishard_deepspeed.kind import Kind
from unishard_deepspeed.private.reduction import drop, gather, reduce_last, remove_hooks


class ConditionalModules:
    """The conditional modules of a model under DeepSpeed. Each method is collective."""

    def __init__(self, engine: Any, conditional: Sequence[Unit], units: Sequence[str], kind: Kind) -> None:
        self._kind = kind
        self._optimizer = engine.optimizer
        self.parameters = [
            parameter for unit in conditional for parameter in unit.module.parameters() if parameter.requires_grad
        ]
        """Their trainable parameters, in model order."""
        outside = [unit.module for unit in conditional if not _is_inside(unit.name, units)]
        self.entered = (
            [] if kind != "stage-3" else entered_modules(engine.module, units, [unit.name for unit in conditional])
        )
        """At stage 3, modules whose parameters DeepSpeed gathers when they are entered, besides the leaf modules."""
        self._gathered: list[nn.Parameter] = []
        """At stage 3, parameters outside leaf modules, which DeepSpeed would gather only on ranks that enter their
        module."""
        if outside and kind == "stage-3":
            self._gathered = list(dict.fromkeys(parameter for module in outside for parameter in module.parameters()))
            remove_hooks(engine.optimizer, [inner for module in outside for inner in module.modules()])

    def reduce_last(self) -> None:
        """Reduce their gradients at the end of backward, in the same order on every rank, with zeros for missing
        ones.
        """
        if self.parameters:
            reduce_last(self._optimizer, self.parameters, self._kind)

    def gather(self) -> None:
        """Gather before each forward the parameters that no hook gathers."""
        if self._gathered:
            gather(self._gathered)

    def drop(self, kept: Collection[nn.Parameter]) -> None:
        """Keep only this rank's shard after each backward, but for parameters that stay gathered."""
        if dropped := [parameter for parameter in self._gathered if parameter not in kept]:
            drop(dropped)


def entered_modules(model: nn.Module, *names: Sequence[str]) -> list[Unit]:
    """Modules with parameters of their own, except those with one of these names, and what is inside them."""
    known = [name for each in names for name in each]
    return [
        Unit(name, module)
        for name, module in model.named_modules()
        if next(module.parameters(recurse=False), None) is not None
        and name not in known
        and not _is_inside(name, known)
    ]


def _is_inside(name: str, modules: Sequence[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)
