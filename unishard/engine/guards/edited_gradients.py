"""Find gradients that the script has changed between a backward and the step."""

from __future__ import annotations

from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from unishard.engine.guards.guard import Guard
from unishard.engine.guards.tensor_marks import versions
from unishard.engine.place import LoopPlace
from unishard.errors import ContractError
from unishard.failures.compared_call import ComparedCall

_PARAMETERS, _ELEMENTS = 8, 16
"""How much of the gradients is compared: clipping and zeroing change all of them."""
_GRADIENT: Any = Tensor.grad
_GRADIENT_OF = _GRADIENT.__get__
"""Not what an engine shows to the script."""

Shown = dict[nn.Parameter, tuple[Tensor | None, int]]
"""Copies of gradients that the script was shown, with the count of writes to each."""


class EditedGradients(Guard):
    """Compares the gradients that the model's parameters hold with what the last backward left there.

    In every micro-batch it looks which there are and how often each was written, and closely at a few elements: torch
    does not count what `torch.nn.utils.clip_grad_norm_` writes to DTensors (torch 2.13). Of engines whose parameters
    hold none or others, it compares the copies that the script was shown.

    Without it: some engines use the edit, such as a clipping by hand, and others never see it.
    """

    def __init__(self, module: nn.Module, shown: Shown, place: LoopPlace) -> None:
        """Keep nothing yet.

        Args:
            module: The prepared model.
            shown: Filled by what shows gradients to the script; emptied here.
            place: Where the loop is.
        """
        self._parameters = [*module.parameters()]
        self._place = place
        self._shown = shown
        self._kept: list[Tensor | None] = []
        self._held: list[Tensor] = []
        """Those of them that there are."""
        self._versions: list[int] = []
        self._elements: list[tuple[Tensor, Tensor]] = []
        """Some gradients with some of their elements."""
        self._found = False
        """Whether a gradient of this window was changed on this rank."""

    def after_backward(self) -> None:
        """Keep what it has left."""
        self._shown.clear()
        if not self._parameters:
            return
        self._kept = [*map(_GRADIENT_OF, self._parameters)]
        self._held = [gradient for gradient in self._kept if gradient is not None]
        if not self._held and self._place.last:  # the engine holds them elsewhere, as stages 2 and 3 of ZeRO do
            self._parameters = []
        self._versions = versions(self._held)
        if self._place.looks:
            with torch.no_grad():
                shards = [shard for shard in map(_local, self._held) if shard.numel()]
                self._elements = [(shard, _some(shard).clone()) for shard in shards[:_PARAMETERS]]

    def before_finish(self) -> None:
        """Compare that with what is there now, once; a gradient that is gone was changed too."""
        if self._shown and any(copy is not None and copy._version != was for copy, was in self._shown.values()):
            self._found = True
        if not self._held:
            return
        same = all(map(is_, self._kept, map(_GRADIENT_OF, self._parameters))) and versions(self._held) == self._versions
        self._found = self._found or not same or self._other_elements()
        self._kept, self._held, self._elements = [], [], []

    def before_backward(self, loss: Tensor, call: ComparedCall) -> None:
        """Compare, before there are others."""
        self.before_finish()

    def before_step(self, call: ComparedCall) -> None:
        """Compare, and refuse the update if a gradient of its window was changed."""
        self.before_finish()
        if self._found and call.last:
            self.forget()
            call.detail = ", with gradients that were changed since backward"
            call.refusal = ContractError(
                "gradients were changed between engine.backward and engine.step, as by torch.nn.utils.clip_grad_norm_, "
                "which other engines would not see; remove that: clip with training.gradient_clipping in the config or "
                "engine.step(clip_grad_norm=1.0), edit a gradient with engine.gradients.write, and drop a window with "
                "engine.discard()"
            )

    def forget(self) -> None:
        """Compare nothing: the window is over."""
        self._shown.clear()
        self._kept, self._held, self._elements = [], [], []
        self._found = False

    @torch.no_grad()
    def _other_elements(self) -> bool:
        changes = [(_some(shard) != then).any() for shard, then in self._elements]
        return bool(changes) and bool(torch.stack([change.to(changes[0].device) for change in changes]).any())


def _local(gradient: Any) -> Tensor:
    """This rank's shard, if the gradient is a DTensor."""
    shard: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return shard


def _some(gradient: Tensor) -> Tensor:
    return gradient.reshape(-1)[-_ELEMENTS:].nan_to_num()
