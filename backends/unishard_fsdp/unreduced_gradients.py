"""Gradients that are accumulated without being reduced, and what FSDP2 before torch 2.15 does not do for them by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from unishard.errors import BackendError
from unishard_fsdp.parameter_usage import ParameterUsage
from unishard_fsdp.patches import PATCHES

if TYPE_CHECKING:
    from unishard.patches import Patch

__all__ = ["UnreducedGradients"]

_LATE = PATCHES["late-gradients"]
_HYBRID = PATCHES["hybrid-accumulation"]


class UnreducedGradients:
    """Follows accumulation windows, and patches FSDP2 for the modules that need it, not before they do.

    Micro-batches that use the same parameters need nothing. Where one leaves out a part of a module, the gradients of that module come in
    two dtypes, or no longer lie where the sum has them.
    """

    def __init__(self, modules: Sequence[nn.Module], *, waits: bool, mixed: bool, between_groups: bool) -> None:
        """Touches nothing yet.

        Args:
            modules: The sharded modules.
            waits: Whether gradients wait for the last micro-batch to be reduced.
            mixed: Whether they are summed in another dtype than they are computed in.
            between_groups: Whether they wait for it to be averaged between groups that hold a copy each.
        """
        self._modules = modules
        self._watches = waits and mixed and _LATE.needed
        self._between_groups = between_groups and _HYBRID.needed
        self._begun = False
        self._usage: ParameterUsage | None = None

    @property
    def patch(self) -> Patch | None:
        """The case that these runs meet in every window, if they meet one."""
        return _HYBRID if self._between_groups else _LATE if self._watches else None

    def patch_all(self) -> None:
        """For units of which ranks use different parts: patch every module at once, before anything else is put around it."""
        if self.patch is not None:
            self._mend(self._modules)
            self._watches = self._between_groups = False

    def begin(self) -> None:
        """Before the forward of a micro-batch that is accumulated."""
        if self._begun:
            return
        self._begun = True
        if self._between_groups:
            self._mend(self._modules)
        elif self._watches:
            self._usage = ParameterUsage(self._modules)

    @contextmanager
    def backward(self, *, last: bool) -> Iterator[None]:
        """Around the backward of a micro-batch.

        Raises:
            BackendError: This torch cannot go on where a part of a module was left out.
        """
        if self._usage is None:
            yield
            return
        left_out = [*self._usage.not_entered(), *self._usage.partly_used()]
        self._follow(left_out)
        try:
            yield
        except (AssertionError, AttributeError, RuntimeError, ValueError) as error:
            if _LATE.works or not left_out:
                raise
            raise BackendError(_LATE.refusal()) from error
        if last:
            self._usage.forget()

    def forget(self) -> None:
        """The window is over."""
        if self._usage is not None:
            self._usage.forget()

    def _follow(self, modules: Sequence[nn.Module]) -> None:
        if modules and _LATE.works:
            self._mend(modules)

    def _mend(self, modules: Sequence[nn.Module]) -> None:
        from unishard_fsdp.patches.accumulation import mend

        mend(modules)
