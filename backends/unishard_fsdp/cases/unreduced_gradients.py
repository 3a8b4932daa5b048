"""Patches for gradients that accumulate without reduction, needed with FSDP2 before torch 2.15."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

from torch import nn

from unishard.errors import BackendError
from unishard_fsdp.cases.case import FSDPCase
from unishard_fsdp.cases.parameter_usage import ParameterUsage
from unishard_fsdp.private import PRIVATE_API
from unishard_fsdp.private.accumulation import patch_post_backward

_MIXED = PRIVATE_API["mixed-accumulation"]


@final
class UnreducedGradients(FSDPCase):
    """Tracks accumulation windows, and patches FSDP2 only for modules that need it.

    Micro-batches that use the same parameters need no patch. If one uses only some parameters of a module, the module's
    gradients have two dtypes, or different positions than in the accumulated sum.
    """

    def __init__(self, modules: Sequence[nn.Module], *, between_groups: bool = False) -> None:
        """Changes nothing yet.

        Args:
            modules: The sharded modules.
            between_groups: Whether gradients wait for the last micro-batch to be averaged between groups that each hold
                a copy; else to be reduced, in another dtype than they are computed in.
        """
        self._modules = modules
        self._between_groups = between_groups
        self._begun = False
        self._usage: ParameterUsage | None = None

    def begin(self, *, last: bool) -> None:
        """Prepare for the forward of the first micro-batch that is accumulated."""
        if last or self._begun:
            return
        self._begun = True
        if self._between_groups:
            self.patch_all()
        else:
            self._usage = ParameterUsage(self._modules)

    def patch_all(self) -> None:
        """Patch every module."""
        patch_post_backward(self._modules)

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
            patch_post_backward(incomplete)
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
