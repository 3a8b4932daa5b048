"""Track with torch's hooks which parameters of each unit get a gradient while gradients accumulate without
reduction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from unishard_fsdp.shards import parameter_named


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
        found = []
        for module, parameters in self._gathered.items():
            trained = [parameter for parameter in parameters if parameter.requires_grad]
            self._watch(trained)
            if 0 < sum(parameter in self._used for parameter in trained) < len(trained):
                found.append(module)
        return found

    def forget(self) -> None:
        """Reset at the end of a window."""
        self._used.clear()

    def _enter(self, names: Mapping[str, None], module: nn.Module, args: Any) -> None:
        self._hooks.pop(module).remove()
        # A parameter shared with a module inside this one may be sharded now; it is tracked there.
        parameters = [parameter_named(module, name) for name in names]
        self._gathered[module] = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]

    def _watch(self, trained: Iterable[nn.Parameter]) -> None:
        """Register one hook per parameter, also for those unfrozen later."""
        for parameter in trained:
            if parameter not in self._watched:
                self._watched.add(parameter)
                parameter.register_post_accumulate_grad_hook(self._used.add)  # type: ignore[no-untyped-call]


def own_names(module: nn.Module) -> dict[str, None]:
    """Names of a sharded module's parameters, without those of sharded modules inside it."""
    return dict.fromkeys(name for name, _ in _own(module, ""))


def _own(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in module.named_parameters(recurse=False):
        yield prefix + name, parameter
    for name, child in module.named_children():
        if not isinstance(child, FSDPModule):
            yield from _own(child, f"{prefix}{name}.")


# -- Trainable parameters that a script freezes for some forwards, as PEFT's `disable_adapter` does for a reference --

_requires_grad = attrgetter("requires_grad")
"""In C, since it is asked of every parameter before every forward."""


class ToggledParameters:
    """Finds parameters whose shards stay frozen although the script has unfrozen them.

    A gathered parameter is another tensor than its shard, and gets its `requires_grad` when it is gathered, never the
    other way around (torch 2.13, _fully_shard/_fsdp_param.py, to_unsharded). So a parameter that is frozen while it is
    sharded, and unfrozen after a forward that left it gathered, would be frozen again in the next window.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._found = False
        self.watch()

    def watch(self) -> None:
        """Take those as trainable that are so now. Called while all are sharded."""
        self._shards = {name: shard for name, shard in self._module.named_parameters() if shard.requires_grad}

    def look(self) -> bool:
        """Before a forward: whether a shard is frozen."""
        frozen = not self.all_trainable()
        self._found = self._found or frozen
        return frozen

    def all_trainable(self) -> bool:
        """Whether no shard is frozen."""
        return all(map(_requires_grad, self._shards.values()))

    def restore(self) -> None:
        """Before parameters are sharded again: unfreeze the shards of those that are gathered and unfrozen."""
        if self._found:
            self._found = False
            for name, shard in self._shards.items():
                if not shard.requires_grad and parameter_named(self._module, name).requires_grad:
                    shard.requires_grad_(True)


# -- Find conditional parameters that no rank has used in an accumulation window -------------------


class ConditionalParameters:
    """The sharded parameters of conditional modules.

    If no rank has used one in a window, it has no gradient, as in plain torch.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        self.parameters = parameters
        self.used: set[Tensor] = set()
        """The parameters that this rank has used since the last update."""
        self._flags = torch.empty(len(parameters), dtype=torch.uint8, device=device)
        self._found = False

    def find(self) -> None:
        """Remove the zero gradients of parameters that no rank has used, once at the end of a window. Collective."""
        if self._found or not self.parameters:
            return
        self._found = True
        complete = len(self.used) == len(self.parameters)
        if complete:
            self._flags.fill_(1)
        else:
            self._flags.copy_(
                torch.tensor([parameter in self.used for parameter in self.parameters], dtype=torch.uint8)
            )
        if dist.get_world_size() > 1:
            dist.all_reduce(self._flags, dist.ReduceOp.MAX)
        if complete:  # whatever the others used: the answer is known without waiting for the device
            return
        for parameter, used in zip(self.parameters, self._flags.tolist(), strict=True):
            if not used:
                parameter.grad = None

    def forget(self) -> None:
        """Reset at the end of a window."""
        self.used.clear()
        self._found = False
