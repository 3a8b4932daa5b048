"""Conditional modules: those that a rank may skip in a micro-batch, but that every rank gathers and reduces."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from unishard.contract.units import Unit
from unishard_deepspeed.cases.case import ZeroCase
from unishard_deepspeed.private.partitioned import drop, gather, remove_hooks
from unishard_deepspeed.private.zero_optimizer import ZeroOptimizer
from unishard_deepspeed.sharding.entered_modules import is_inside, is_sharded


@final
class ConditionalModules(ZeroCase):
    """The conditional modules of a model, and replicated parameters, which a rank may skip as well."""

    def __init__(
        self,
        zero: ZeroOptimizer,
        conditional: Sequence[Unit],
        units: Sequence[str],
        entered: Sequence[Unit],
        parameters: Sequence[nn.Parameter],
    ) -> None:
        """Find what is gathered and reduced apart from the rest.

        Args:
            zero: DeepSpeed's optimizer.
            conditional: The modules.
            units: Names of the leaf modules.
            entered: Other modules whose parameters DeepSpeed gathers when they are entered.
            parameters: The trainable parameters that a rank may skip.
        """
        model = zero.engine.module
        outside = [unit.module for unit in conditional if not is_inside(unit.name, units)]
        every = dict.fromkeys(parameter for module in outside for parameter in module.parameters())
        self._gathered = [*filter(is_sharded, every)]
        """At stage 3, parameters outside leaf modules, which DeepSpeed would gather only on ranks that enter their
        module."""
        if parameters:
            zero.reduce_last(parameters)
        if outside and zero.gathers:
            remove_hooks(zero.optimizer, [inner for module in outside for inner in module.modules()])
        if parameters and zero.gathers:
            remove_hooks(zero.optimizer, (each for each in model.modules() if _is_empty(each)))
            optional = set(parameters)
            gathered = [*map(model.get_submodule, units), *(unit.module for unit in entered)]
            _need_gradients(module for module in gathered if optional.issuperset(_trained(module)))

    def before_forward(self) -> None:
        """Gather the parameters that no hook gathers."""
        if self._gathered:
            gather(self._gathered)

    def after_backward(self, kept: Collection[nn.Parameter]) -> None:
        """Keep only this rank's shard, but for parameters that stay gathered."""
        if dropped := [parameter for parameter in self._gathered if parameter not in kept]:
            drop(dropped)


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
