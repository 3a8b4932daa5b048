"""Conditional modules: those that a rank may skip in a micro-batch, but that every rank gathers and reduces."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unishard.contract.kit.replicated import is_replicated
from unishard.contract.units import Unit
from unishard_deepspeed.private.partitioned import drop, gather, is_partitioned, remove_hooks
from unishard_deepspeed.private.zero_optimizer import ZeroOptimizer


class ConditionalModules:
    """The conditional modules of a model under DeepSpeed. Each method is collective."""

    def __init__(
        self,
        zero: ZeroOptimizer,
        conditional: Sequence[Unit],
        units: Sequence[str],
        replicated: Sequence[nn.Parameter] = (),
    ) -> None:
        """Find what is gathered and reduced apart from the rest.

        Args:
            zero: DeepSpeed's optimizer.
            conditional: The modules.
            units: Names of the leaf modules.
            replicated: Trainable parameters that every rank holds whole: a rank may skip them as well.
        """
        model = zero.engine.module
        inside = [parameter for unit in conditional for parameter in unit.module.parameters()]
        self.parameters = [*dict.fromkeys(each for each in (*inside, *replicated) if each.requires_grad)]
        """Their trainable parameters, and those that are replicated."""
        outside = [unit.module for unit in conditional if not _is_inside(unit.name, units)]
        self.entered = entered_modules(model, units, [unit.name for unit in conditional])
        """At stage 3, modules whose parameters DeepSpeed gathers when they are entered, besides the leaf modules."""
        every = dict.fromkeys(parameter for module in outside for parameter in module.parameters())
        self._gathered = [*filter(_is_sharded, every)]
        """At stage 3, parameters outside leaf modules, which DeepSpeed would gather only on ranks that enter their
        module."""
        if self.parameters:
            zero.reduce_last(self.parameters)
        if outside and zero.gathers:
            remove_hooks(zero.optimizer, [inner for module in outside for inner in module.modules()])
        if self.parameters and zero.gathers:
            remove_hooks(zero.optimizer, (each for each in model.modules() if _is_empty(each)))
            optional = set(self.parameters)
            gathered = [*map(model.get_submodule, units), *(unit.module for unit in self.entered)]
            _need_gradients(module for module in gathered if optional.issuperset(_trained(module)))

    def gather(self) -> None:
        """Gather before each forward the parameters that no hook gathers."""
        if self._gathered:
            gather(self._gathered)

    def drop(self, kept: Collection[nn.Parameter]) -> None:
        """Keep only this rank's shard after each backward, but for parameters that stay gathered."""
        if dropped := [parameter for parameter in self._gathered if parameter not in kept]:
            drop(dropped)


def entered_modules(model: nn.Module, *names: Sequence[str]) -> list[Unit]:
    """Modules with parameters of their own that are sharded, except those with one of these names, and
    what is inside them.
    """
    known = [name for each in names for name in each]
    return [
        Unit(name, module)
        for name, module in model.named_modules()
        if any(map(_is_sharded, module.parameters(recurse=False))) and name not in known and not _is_inside(name, known)
    ]


def _is_sharded(parameter: nn.Parameter) -> bool:
    return is_partitioned(parameter) and not is_replicated(parameter)


def _is_empty(module: nn.Module) -> bool:
    """Whether there is nothing to gather, as of a dropout that a rank leaves out with what is before it."""
    return next(module.parameters(), None) is None


def _trained(module: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for parameter in module.parameters() if parameter.requires_grad)


def _need_gradients(modules: Iterable[nn.Module]) -> None:
    """Let the outputs of modules that a rank may have nothing to train in need a gradient, so that every rank gathers
    them in backward: by itself, only a rank would that has run something to train before them.
    """
    for module in modules:
        module.register_forward_pre_hook(_need_gradient, prepend=True, with_kwargs=True)


def _need_gradient(module: nn.Module, args: Any, kwargs: Any) -> Any:
    floats = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.is_floating_point()]
    if not torch.is_grad_enabled() or not floats or any(value.requires_grad for value in floats):
        return None
    needs = floats[0].detach().requires_grad_()
    return (
        tuple(needs if value is floats[0] else value for value in args),
        {name: needs if value is floats[0] else value for name, value in kwargs.items()},
    )


def _is_inside(name: str, modules: Sequence[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)
