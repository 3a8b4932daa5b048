"""Detect another engine's backward that reaches this model's parameters."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unishard.contract.adapter import EngineAdapter
from unishard.contract.private_api import CORE_PRIVATE_API
from unishard.engine.loop.call_order import CallOrder
from unishard.engine.loop.tensor_marks import versions
from unishard.errors import ContractError

_FOREIGN = CORE_PRIVATE_API["foreign-backward"]


class ForeignBackwardCheck:
    """Raises if a backward of another engine, or of the user, reaches this model's parameters through an output of its
    forward.
    """

    def __init__(self, adapter: EngineAdapter) -> None:
        self._adapter = adapter
        self._own = False
        adapter.on_gradient = self._on_gradient

    @contextmanager
    def own_backward(self) -> Iterator[None]:
        """A block in which the engine's own backward runs."""
        self._own = True
        try:
            yield
        finally:
            self._own = False

    def _on_gradient(self, gradient: Tensor) -> None:
        if self._own:
            return
        if any(map(_will_accumulate, self._adapter.leaves())):
            raise ContractError(
                "a backward that is not this engine's reaches the parameters of its "
                f"{type(self._adapter.module).__name__} and would mix gradients with its own; call this engine's "
                "backward(loss), or, if the loss trains only another model, compute and backward it inside `with "
                "engine.weights.frozen():`; if it is to train both, put both models into one nn.Module, and prepare "
                "that"
            )
        self._adapter.input_gradients(graph=torch.is_grad_enabled())


def _will_accumulate(leaf: Tensor) -> bool:
    """Whether the running backward will accumulate a gradient on a leaf.

    Raises:
        ContractError: This torch version cannot tell.
    """
    if not _FOREIGN.works:
        raise ContractError(_FOREIGN.refusal())
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # for a leaf whose gradient `torch.autograd.grad` returns instead of accumulating
        return False


# -- Find modules and parameters that were added to a model after `prepare`, which no engine trains or saves --


class AddedModules:
    """Refuses what the user adds to a prepared model, such as adapters or a new head."""

    def __init__(self, model: nn.Module, packages: Collection[str]) -> None:
        """Remember the modules, and their parameters with their hooks.

        Args:
            model: The prepared one.
            packages: Whose hooks on parameters are the engine's.
        """
        self._model, self._packages = model, packages
        self._parts = [*model.modules()]
        self._known = {id(part): dict(part.named_parameters(recurse=False)) for part in self._parts}
        self._hooks = {
            id(parameter): self._hooks_on(parameter) for known in self._known.values() for parameter in known.values()
        }

    def refuse(self, *, gathered: bool) -> None:
        """Look through the model.

        Args:
            gathered: Whether weights were gathered, so that FSDP2 may have put them in the place of a shard.

        Raises:
            ContractError: A module, a parameter or a gradient hook is new.
        """
        for name, part in self._model.named_modules():
            known = self._known.get(id(part), {})
            for own, parameter in part.named_parameters(recurse=False):
                if self._hooks_on(parameter) > self._hooks.get(id(parameter), 0):
                    raise ContractError(
                        f"parameter {name}{'.' if name else ''}{own} got a gradient hook after unishard.prepare, which "
                        "engines that shard it call with other gradients, or never; remove it, and edit gradients with "
                        "engine.gradients.write between engine.backward and engine.step"
                    )
                if own in known and (parameter is known[own] or (gathered and isinstance(known[own], DTensor))):
                    continue
                what = f"parameter {name}{'.' if name else ''}{own}" if id(part) in self._known else f"module {name}"
                raise ContractError(
                    f"{what} was added or replaced after unishard.prepare, so no engine trains or saves it; change the "
                    "model before prepare: get_peft_model, a new head, a resized embedding"
                )

    def _hooks_on(self, parameter: Any) -> int:
        """How many gradient hooks of others a parameter has, in private attributes of torch 2.13, as in
        `engine.model.facts`. A method of a builtin has no module, and may be the engine's.
        """
        kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
        hooks = [hook for kind in kinds for hook in (getattr(parameter, kind, None) or {}).values()]
        origins = (getattr(getattr(hook, "func", hook), "__module__", None) for hook in hooks)
        return sum(origin is not None and origin.partition(".")[0] not in self._packages for origin in origins)


# Warn of a loss that the user has divided by the accumulation steps or the number of items, or multiplied by a loss
# scale, which the engine does too.

_logger = logging.getLogger("unishard")


def warn_if_scaled(loss: Tensor, steps: int) -> None:
    """Log a warning if the last operation of a loss divides it by `steps`, or multiplies it by a loss scale. May wait
    for the device.

    Args:
        loss: With a graph.
        steps: `training.gradient_accumulation_steps`.
    """
    node: Any = loss.grad_fn
    kind = "" if node is None else node.name()
    other = getattr(node, "_saved_other", None) if kind in ("DivBackward0", "MulBackward0") else None
    if not isinstance(other, Tensor | int | float) or (isinstance(other, Tensor) and other.numel() != 1):
        return
    factor = float(other)
    divisor = factor if kind == "DivBackward0" else 1 / factor if factor else 0.0
    if kind == "MulBackward0" and factor >= _LOSS_SCALE and math.frexp(factor)[0] == 0.5:
        _logger.warning(
            "the loss that was passed to engine.backward ends in a multiplication by %d, as by GradScaler.scale; no "
            "engine divides the gradients by it, and their norm and clipping are wrong: remove the scaler, as "
            "precision: fp16 in the config scales the loss (ignore this if the multiplication has another purpose)",
            factor,
        )
    if steps > 1 and abs(divisor - steps) <= 1e-6 * steps:
        _logger.warning(
            "the loss that was passed to engine.backward ends in a division by %d, which is "
            "training.gradient_accumulation_steps; engine.backward divides by the accumulation window itself: pass the "
            "undivided loss, or the gradients are %d times too small (ignore this if the division has another purpose)",
            steps,
            steps,
        )


_LOSS_SCALE = 256
"""The least power of two that is taken for the scale of torch's GradScaler, which begins at 65536."""
_MEAN = 1
"""`reduction="mean"` in the graph of torch's losses (torch 2.13, aten/src/ATen/core/Reduction.h)."""
_SAME_VALUE = ("ViewBackward0", "ToCopyBackward0", "SqueezeBackward0", "AliasBackward0", "CloneBackward0")


def warn_if_mean(loss: Tensor) -> None:
    """Log a warning if a loss that is passed with `num_items` ends in a mean. Does not wait for the device.

    Args:
        loss: With a graph.
    """
    node: Any = loss.grad_fn
    # An engine's own functions around an output have one input, and return its value.
    while node is not None and (
        node.name() in _SAME_VALUE or isinstance(node, torch.autograd.function.BackwardCFunction)
    ):
        inputs = [each for each, _ in node.next_functions if each is not None]
        node = inputs[0] if len(inputs) == 1 else None
    kind = "" if node is None else node.name()
    if kind.startswith("MeanBackward") or ("Loss" in kind and getattr(node, "_saved_reduction", None) == _MEAN):
        _logger.warning(
            "the loss that was passed to engine.backward with num_items ends in a mean (%s), and the engine divides it "
            "by the number of items again; pass the sum of the losses of the items, as with reduction='sum', or leave "
            "num_items out (ignore this if the mean has another purpose)",
            kind,
        )


# -- Warn of a run that trains no more, because each update is skipped -----------------------------

_LIMIT = 5


class SkippedUpdates:
    """Counts the updates in a row that were skipped because a gradient was not finite, and warns of the first long
    streak.
    """

    def __init__(self) -> None:
        self.streak = 0
        self._warned = dist.get_rank() != 0

    def add(self, *, skipped: bool, lowered: bool) -> None:
        """Count an update.

        Args:
            skipped: Whether it was skipped.
            lowered: Whether fp16's loss scale was lowered for it, which is how its size is found.
        """
        if not skipped:
            self.streak = 0
        elif not lowered:
            self.streak += 1
        if self.streak == _LIMIT and not self._warned:
            self._warned = True
            _logger.warning(
                "%d updates in a row were skipped, because a gradient is infinite or NaN; nothing is trained while "
                "this lasts: check the "
                "batches and the loss, lower optimizer.lr, or set training.nonfinite to raise to stop at the first one",
                _LIMIT,
            )


# Detect gradients that the user's code changed between a backward and the step; some engines would use them, others
# never see it.

_PARAMETERS, _ELEMENTS = 8, 16
"""How much of the gradients is compared: clipping and zeroing change all of them."""
_OWN_GRADIENT: Any = Tensor.grad
_GRADIENT = _OWN_GRADIENT.__get__
"""Not what an engine shows to the script."""


class EditedGradients:
    """Compares the gradients that the model's parameters hold with what the last backward left there: in every
    micro-batch which there are and how often each was written, and where `Sampling` looks a few elements. torch does
    not count what `torch.nn.utils.clip_grad_norm_` writes to DTensors (torch 2.13).

    Of engines whose parameters hold none or others, it compares the copies that the script was shown.
    """

    def __init__(self, module: nn.Module, order: CallOrder) -> None:
        self._parameters = [*module.parameters()]
        self._order = order
        self._kept: list[Tensor | None] = []
        self._held: list[Tensor] = []
        """Those of them that there are."""
        self._versions: list[int] = []
        self._elements: list[tuple[Tensor, Tensor]] = []
        """Some gradients with some of their elements."""
        self.found = False
        """Whether a gradient of this window was changed on this rank."""
        self.shown: dict[nn.Parameter, tuple[Tensor | None, int]] = {}
        """Copies that the script was shown, with the count of writes to each."""

    @torch.no_grad()
    def keep(self) -> None:
        """Keep what a backward has left."""
        self.shown.clear()
        self._kept = [*map(_GRADIENT, self._parameters)]
        self._held = [gradient for gradient in self._kept if gradient is not None]
        if not self._held and self._order.last:  # the engine holds them elsewhere, as stages 2 and 3 of ZeRO do
            self._parameters = []
        self._versions = versions(self._held)
        if self._order.looks:
            shards = [shard for shard in map(_local, self._held) if shard.numel()]
            self._elements = [(shard, _some(shard).clone()) for shard in shards[:_PARAMETERS]]

    @torch.no_grad()
    def compare(self) -> None:
        """Compare that with what is there now, once; a gradient that is gone was changed too."""
        if any(copy is not None and copy._version != version for copy, version in self.shown.values()):
            self.found = True
        if not self._held:
            return
        same = all(map(is_, self._kept, map(_GRADIENT, self._parameters))) and versions(self._held) == self._versions
        changes = [(_some(shard) != then).any() for shard, then in self._elements]
        changed = bool(changes) and bool(torch.stack([change.to(changes[0].device) for change in changes]).any())
        self.found = self.found or changed or not same
        self._kept, self._held, self._elements = [], [], []

    def clear(self) -> None:
        """Compare nothing: the window is over, or the engine itself has changed its gradients."""
        self.shown.clear()
        self._kept, self._held, self._elements = [], [], []
        self.found = False

    def refuse(self) -> NoReturn:
        """Raise ContractError."""
        self.clear()
        raise ContractError(
            "gradients were changed between engine.backward and engine.step, as by torch.nn.utils.clip_grad_norm_, "
            "which other engines would not see; remove that: clip with training.gradient_clipping in the config or "
            "engine.step(clip_grad_norm=1.0), edit a gradient with engine.gradients.write, and drop a window with "
            "engine.discard()"
        )


def _local(gradient: Any) -> Tensor:
    """This rank's shard, if the gradient is a DTensor."""
    shard: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return shard


def _some(gradient: Tensor) -> Tensor:
    return gradient.reshape(-1)[-_ELEMENTS:].nan_to_num()
