"""Let a unit of a sharded model run before the model itself has run."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.distributed.fsdp import FSDPModule

from unishard_fsdp.units.forward_methods import run_as_forward


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
