"""Conditional modules: those that a rank may skip in a micro-batch, but that every rank gathers and reduces."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from unishard.contract.kit.replicated import is_replicated
from unishard.contract.units import Unit
from unishard_deepspeed.kind import Kind
from unishard_deepspeed.private.reduction import drop, gather, reduce_last, remove_hooks


class ConditionalModules:
    """The conditional modules of a model under DeepSpeed. Each method is collective."""

    def __init__(
        self,
        engine: Any,
        conditional: Sequence[Unit],
        units: Sequence[str],
        kind: Kind,
        replicated: Sequence[nn.Parameter] = (),
    ) -> None:
        """Find what is gathered and reduced apart from the rest.

        Args:
            engine: The `DeepSpeedEngine`.
            conditional: The modules.
            units: Names of the leaf modules.
            kind: The optimizer's kind.
            replicated: Trainable parameters that every rank holds whole: a rank may skip them as well.
        """
        self._kind = kind
        self._optimizer = engine.optimizer
        inside = [parameter for unit in conditional for parameter in unit.module.parameters()]
        self.parameters = [*dict.fromkeys(each for each in (*inside, *replicated) if each.requires_grad)]
        """Their trainable parameters, and those that are replicated."""
        outside = [unit.module for unit in conditional if not _is_inside(unit.name, units)]
        self.entered = (
            [] if kind != "stage-3" else entered_modules(engine.module, units, [unit.name for unit in conditional])
        )
        """At stage 3, modules whose parameters DeepSpeed gathers when they are entered, besides the leaf modules."""
        self._gathered: list[nn.Parameter] = []
        """At stage 3, parameters outside leaf modules, which DeepSpeed would gather only on ranks that enter their
        module."""
        if outside and kind == "stage-3":
            every = dict.fromkeys(parameter for module in outside for parameter in module.parameters())
            self._gathered = [parameter for parameter in every if not is_replicated(parameter)]
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
    """Modules with parameters of their own that are not whole on every rank, except those with one of these names, and
    what is inside them.
    """
    known = [name for each in names for name in each]
    return [
        Unit(name, module)
        for name, module in model.named_modules()
        if not all(map(is_replicated, module.parameters(recurse=False)))
        and name not in known
        and not _is_inside(name, known)
    ]


def _is_inside(name: str, modules: Sequence[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)
