"""Patches for gradients that accumulate without reduction, needed with FSDP2 before torch 2.15."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from unishard.errors import BackendError
from unishard_fsdp.parameter_usage import ParameterUsage
from unishard_fsdp.private import PRIVATE_API

if TYPE_CHECKING:
    from unishard.contract.private_api import PrivateApi

_MIXED = PRIVATE_API["mixed-accumulation"]
_HYBRID = PRIVATE_API["hybrid-accumulation"]


class UnreducedGradients:
    """Tracks accumulation windows, and patches FSDP2 only for modules that need it.

    Micro-batches that use the same parameters need no patch. If one uses only some parameters of a module, the module's
    gradients have two dtypes, or different positions than in the accumulated sum.
    """

    def __init__(self, modules: Sequence[nn.Module], *, waits: bool, mixed: bool, between_groups: bool) -> None:
        """Changes nothing yet.

        Args:
            modules: The sharded modules.
            waits: Whether gradients wait for the last micro-batch to be reduced.
            mixed: Whether they are summed in another dtype than they are computed in.
            between_groups: Whether they wait for the last micro-batch to be averaged between groups that each hold a
                copy.
        """
        self._modules = modules
        self._watches = waits and mixed and _MIXED.needed
        self._between_groups = between_groups and _HYBRID.needed
        self._begun = False
        self._usage: ParameterUsage | None = None

    @property
    def patch(self) -> PrivateApi | None:
        """The patch that this run needs, if any."""
        return _HYBRID if self._between_groups else _MIXED if self._watches else None

    def patch_all(self) -> None:
        """Patch every module at once, before others wrap it: for modules of which ranks use different
        parameters.
        """
        if self.patch is not None:
            self._patch(self._modules)
            self._watches = self._between_groups = False

    def begin(self) -> None:
        """Prepare for the forward of a micro-batch that is accumulated."""
        if self._begun:
            return
        self._begun = True
        if self._between_groups:
            self._patch(self._modules)
        elif self._watches:
            self._usage = ParameterUsage(self._modules)

    @contextmanager
    def backward(self, *, last: bool) -> Iterator[None]:
        """A block with the backward of a micro-batch.

        Raises:
            BackendError: Parameters of a module were unused, and this torch lacks a private name for that.
        """
        if self._usage is None:
            yield
            return
        incomplete = [*self._usage.not_entered(), *self._usage.partly_used()]
        if incomplete and _MIXED.works:
            self._patch(incomplete)
        try:
            yield
        except (AssertionError, AttributeError, RuntimeError, ValueError) as error:
            if _MIXED.works or not incomplete:
                raise
            raise BackendError(_MIXED.refusal()) from error
        if last:
            self._usage.forget()

    def forget(self) -> None:
        """Reset at the end of a window."""
        if self._usage is not None:
            self._usage.forget()

    def _patch(self, modules: Sequence[nn.Module]) -> None:
        from unishard_fsdp.private.accumulation import patch_post_backward

        patch_post_backward(modules)
