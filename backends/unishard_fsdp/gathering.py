"""Sharded modules whose parameters stay gathered for `engine.weights.unsharded`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from unishard_fsdp.parameter_usage import own_names
from unishard_fsdp.shards import parameter_named

# -- Run a function as a forward of a sharded module, with FSDP2's work before and after it, by public API --

_NAME = "_unishard_forward"


def run_as_forward(module: nn.Module, function: Callable[..., Any], *inputs: Any) -> Any:
    """Run a function of tensors in place of the module's forward.

    Args:
        module: What `fully_shard` was called on.
        function: A method of the module for the length of the call.
        inputs: For the function.
    """
    vars(module)[_NAME] = function
    try:
        register_fsdp_forward_method(module, _NAME)
        return getattr(module, _NAME)(*inputs)
    finally:
        vars(module).pop(_NAME)


_OF_DTENSOR = (
    "mixed torch.Tensor and DTensor",
    "for tensor subclasses",
    "remove or reshape sharded dimension",
    "along the sharded dimension",
    "Sharding propagation failed",
)
"""In torch 2.13's errors for operations on a parameter that is not gathered (torch/distributed/tensor/_dispatch.py,
_ops/_view_ops.py; torch/_tensor.py)."""


def sharded_read(error: RuntimeError, units: Sequence[str]) -> str | None:
    """What helps against the error of an operation on a shard; None for other errors."""
    if not any(text in str(error) for text in _OF_DTENSOR):
        return None
    if not units:
        return ""
    return (
        f"the units are {', '.join(units[:8])}: name only the classes of the blocks in sharding.units, so that weights "
        "used elsewhere, such as an embedding's, stay with the root"
    )


class UnshardedModules:
    """Keeps sharded modules gathered in a block, and reduces the gradients of reads that FSDP2 does not expect."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._open: list[FSDPModule] = []
        self._leaves: list[Tensor] = []

    @contextmanager
    def gathered(self, names: Iterable[str]) -> Iterator[None]:
        """A block in which the modules that hold these parameters are gathered. Collective."""
        owners = list(dict.fromkeys(map(self._owner, names)))
        # A number in reshard_after_forward has no public setter, so what was resharded after a forward is gathered
        # again at once.
        hooks = [cast(nn.Module, owner).register_forward_hook(_unshard) for owner in owners]
        try:
            self._open = owners
            self.gather_again()
            self._leaves = [leaf for owner in owners for leaf in own_leaves(cast(nn.Module, owner))]
            yield
        finally:
            self._open, self._leaves = [], []
            for hook in hooks:
                hook.remove()
            for owner in owners:
                owner.reshard()

    def gather_again(self) -> None:
        """Gather the modules of the block, after all were sharded."""
        for owner in self._open:
            owner.unshard()

    def set_reshard_after_backward(self, reshard: bool) -> None:
        """Set it for the modules of the block."""
        for owner in self._open:
            owner.set_reshard_after_backward(reshard, recurse=False)

    def reduce_late(self) -> None:
        """Reduce gradients that came after FSDP2 had reduced those of their module. Collective.

        It does so once the inputs of the module have their gradients. A read that was made before the module's forward
        gets its gradient only then, and the gradient would wait for the next backward.
        """
        if self._open:
            reduce_late(cast(nn.Module, self._open[0]), self._leaves)

    def _owner(self, name: str) -> FSDPModule:
        """The sharded module around a parameter that is nearest to it."""
        owner = module = self._module
        for part in name.split(".")[:-1]:
            module = getattr(module, part)
            if isinstance(module, FSDPModule):
                owner = cast(nn.Module, module)
        return cast(FSDPModule, owner)


def _unshard(module: Any, *forward: Any) -> None:
    module.unshard()


def own_leaves(owner: nn.Module) -> Iterator[Tensor]:
    """The gathered parameters of a sharded module, without those of sharded modules inside it."""
    for name in own_names(owner):
        parameter = parameter_named(owner, name)
        if not isinstance(parameter, DTensor):  # else a module inside this one shards it
            yield parameter


def reduce_late(module: nn.Module, leaves: Iterable[Tensor]) -> None:
    """Reduce gradients that FSDP2 has left on gathered parameters after a backward. Collective.

    An empty forward of one module makes FSDP2 go through all of them (torch 2.13, _fsdp_state.py,
    _root_post_backward_final_callback).

    Args:
        module: What `fully_shard` was called on.
        leaves: The gathered parameters.
    """
    late = next((leaf for leaf in leaves if leaf.grad is not None), None)
    if late is not None:
        empty = torch.zeros((), device=late.device, requires_grad=True)
        run_as_forward(module, torch.clone, empty).backward()


# -- Gather a sharded model's root parameters for `generate` ---------------------------------------


@contextmanager
def gathering_in_generate(module: nn.Module) -> Iterator[None]:
    """Gather parameters outside units: `generate` may run an encoder, or the model inside an adapter, without the
    root's forward.
    """
    before = vars(module).get("generate")
    register_fsdp_forward_method(module, "generate")
    try:
        yield
    finally:
        if before is None:
            vars(module).pop("generate", None)
        else:
            vars(module)["generate"] = before


# -- Let a unit of a sharded model run before the model itself has run -----------------------------


class RootFirst:
    """Initializes FSDP2 from the root when a unit is called first, as in `engine.module.encoder(...)` before any
    `engine(...)`.

    FSDP2 takes the first module that runs for the root: the unit's forward ends in an AttributeError, and the root is
    refused later (torch 2.13, _fsdp_state.py `_lazy_init`). An empty method, registered as a forward of the root,
    initializes it by public API.

    Args:
        module: The prepared model.
        before: Called before a unit initializes FSDP2.
    """

    def __init__(self, module: nn.Module, before: Callable[[], None] = lambda: None) -> None:
        units = [part for part in module.modules() if isinstance(part, FSDPModule) and part is not module]
        self._module, self._before = module, before
        self._hooks = []
        if isinstance(module, FSDPModule):
            self._hooks = [module.register_forward_pre_hook(self.forget, prepend=True)]
            self._hooks += [unit.register_forward_pre_hook(self._run_root, prepend=True) for unit in units]

    def forget(self, *forward: object) -> None:
        """Remove the hooks: the root runs, or does not matter any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def run(self) -> None:
        """Initialize FSDP2 from the root, if nothing has."""
        if self._hooks:
            self._run_root()

    def _run_root(self, *forward: object) -> None:
        self.forget()
        self._before()
        run_as_forward(self._module, lambda: None)


# -- Embeddings whose weights are not gathered in backward -----------------------------------------


class UngatheredEmbeddings:
    """Gathers them again once the user registers a hook on one, which may compute with its weight.

    Its backward then needs the weight, whose memory FSDP2 has freed: torch 2.13 would end in a segmentation fault.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Hold the sharded embeddings."""
        self._modules = list(modules)

    def look(self) -> None:
        """Look at the hooks before a backward. A hook after the forward finds only a shard of the weight."""
        for module in [module for module in self._modules if any(map(_is_foreign, module._forward_pre_hooks.values()))]:
            cast(FSDPModule, module).set_unshard_in_backward(True)
            self._modules.remove(module)


def _is_foreign(hook: object) -> bool:
    return not str(getattr(hook, "__module__", "")).startswith(("torch.distributed.", "unishard"))
