"""Track with torch's hooks which parameters of each unit get a gradient while gradients accumulate without
reduction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from unishard.contract.kit.replicated import is_replicated
from unishard_fsdp.units.dimensionless import parameter_named
from unishard_fsdp.units.unit_parameters import own_names


class ParameterUsage:
    """Tracks the gathered parameters of sharded modules. The cost is a call of `set.add` per gradient."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Register hooks, before the forward of the first micro-batch that is accumulated."""
        self._gathered: dict[nn.Module, list[nn.Parameter]] = {}
        self._used: set[Tensor] = set()
        self._watched: set[Tensor] = set()
        self._hooks: dict[nn.Module, RemovableHandle] = {}
        for module in modules:
            # After FSDP2's own hook, which sets the gathered parameters on the module.
            self._hooks[module] = module.register_forward_pre_hook(partial(self._enter, own_names(module)))

    def not_entered(self) -> list[nn.Module]:
        """Modules whose forward has not run yet."""
        return list(self._hooks)

    def partly_used(self) -> list[nn.Module]:
        """Modules in which only some parameters have a gradient in this window. Call it before each backward."""
        modules = []
        for module, parameters in self._gathered.items():
            trained = [parameter for parameter in parameters if parameter.requires_grad]
            self._watch(trained)
            if 0 < sum(parameter in self._used for parameter in trained) < len(trained):
                modules.append(module)
        return modules

    def forget(self) -> None:
        """Reset at the end of a window."""
        self._used.clear()

    def _enter(self, names: Mapping[str, None], module: nn.Module, args: Any) -> None:
        self._hooks.pop(module).remove()
        # A parameter shared with a module inside this one may be sharded now; it is tracked there.
        parameters = [parameter_named(module, name) for name in names]
        self._gathered[module] = [
            parameter for parameter in parameters if not isinstance(parameter, DTensor) and not is_replicated(parameter)
        ]

    def _watch(self, trained: Iterable[nn.Parameter]) -> None:
        """Register one hook per parameter, also for those unfrozen later."""
        for parameter in trained:
            if parameter not in self._watched:
                self._watched.add(parameter)
                parameter.register_post_accumulate_grad_hook(self._used.add)  # type: ignore[no-untyped-call]
