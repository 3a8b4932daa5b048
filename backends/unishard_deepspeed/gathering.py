"""Stage 3: keep parameters gathered for `engine.weights.unsharded`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from unishard.contract.units import Unit
from unishard.engine.loop.forward_errors import modules_in
from unishard.errors import ModelError
from unishard_deepspeed.private.optimizer_kind import Kind
from unishard_deepspeed.private.reduction import drop, gather, not_freed, reduce_last, remove_hooks
from unishard_deepspeed.private.shown_parameters import OUTSIDE

_EMPTY = re.compile(r"\(0\)|\[0\]|\b0x\d|\dx0\b|'weight' must be 2-D")
"""In torch 2.13's errors for shapes, where one tensor is a parameter that is not gathered, which has the shape (0,)."""


def is_of_shard(error: RuntimeError) -> bool:
    """Whether an error is that of an operation on an empty tensor, or of a weight that was read in its place."""
    return OUTSIDE in str(error) or _EMPTY.search(str(error)) is not None


@contextmanager
def keep_gathered(engine: Any, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """A block in which parameters are full. Collective.

    Args:
        engine: The `DeepSpeedEngine`.
        parameters: Its parameters.
    """
    import deepspeed

    # what was prefetched and not used is in flight, and would be freed by the next forward
    engine.empty_partition_cache()
    with not_freed(parameters), deepspeed.zero.GatheredParameters(list(parameters)):
        yield


# -- Stage 3: explain why a module whose parameters are replaced by other tensors for a call cannot run --


@contextmanager
def explained(model: nn.Module) -> Iterator[None]:
    """A block that runs a forward.

    Raises:
        ModelError: A module was called with tensors in place of its parameters, as `torch.func.functional_call` does.
            DeepSpeed takes all for its own parameters (DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py,
            _fetch_sub_module_impl).
    """
    try:
        yield
    except AttributeError as error:
        if not isinstance(error.obj, Tensor) or not str(error.name).startswith("ds_"):
            raise
        name = next((name for name, _ in modules_in(error.__traceback__, model)), "")
        raise ModelError(
            f"the forward of {name or 'the model'} was called with other tensors in place of its parameters, as by "
            "torch.func.functional_call, which DeepSpeed cannot do under full_shard; compute the weight with "
            "torch.nn.utils.parametrize.register_parametrization, or set sharding to shard_grad_op"
        ) from error


# -- Conditional modules: those that a rank may skip in a micro-batch, but that every rank gathers and reduces --


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
