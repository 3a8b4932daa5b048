"""A model that an Accelerator trains: where Accelerate's loop is in its engine's windows."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import EllipsisType
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from unishard.checkpoint.export.adapters import only_names
from unishard.contract.results import Step
from unishard.engine.engine import Engine
from unishard.engine.optim.compute_groups import follow
from unishard.engine.optim.stepping import same_model
from unishard.errors import ContractError
from unishard.integrations.accelerate.sharing import Sharing
from unishard.integrations.saving import restore_options

__all__ = ["EngineOptimizer", "Trained", "WatchedScheduler", "watched"]

_logger = logging.getLogger("unishard")


class Trained:
    """A model and its engine.

    A micro-batch under `no_sync` does not end its window; every other one is said to end it, and the window goes on if
    the script makes no step.
    """

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer) -> None:
        self.engine = engine
        self.model = engine.framework.routed()
        self.optimizer = EngineOptimizer(optimizer, self)
        self.waits = False
        """Whether there are gradients for the coming update."""
        self.ran = False
        """Whether the model ran since its last backward, so that a loss may be of it."""
        self.last: Step | None = None
        """The last update."""
        self._held = 0
        self._named = [*self.model.named_parameters()]  # once: to walk a model takes a millisecond
        self._max_norm: float | EllipsisType | None = ...
        # Functions, not methods: a copy of the model, for example to average weights, must not copy the engine.
        self._hook = self.model.register_forward_hook(lambda model, args, output: self._after_forward(model))
        vars(self.model)["no_sync"] = lambda: self.inside_window()  # as DDP has it
        if saves := getattr(self.model, "save_pretrained", None):
            try:
                self.model.state_dict()
            except ContractError:  # the model has shards
                vars(self.model)["save_pretrained"] = self._save_all_weights(saves)
        engine.framework.set_boundary(True)

    def _after_forward(self, model: nn.Module) -> None:
        frozen = self.engine._order.blocks.frozen
        if model is not self.model or not model.training or not torch.is_grad_enabled() or frozen:
            return
        if not any(parameter.requires_grad for _, parameter in self._named):
            raise ContractError(
                f"all parameters of {type(model).__name__} were frozen after prepare, and engines keep theirs; to "
                "train another model through it, run that one's forward and backward inside `with "
                "accelerator.engine_of(model).weights.frozen():`"
            )
        self.ran = True

    def _save_all_weights(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """The model's `save_pretrained` with all weights, on the ranks that have them. Collective without them."""

        def save_pretrained(*args: Any, **kwargs: Any) -> Any:
            state_dict = kwargs.get("state_dict")
            weights = self.engine.weights.state_dict() if state_dict is None else state_dict
            if not weights:
                return None
            with only_names(self.model):  # for which peft asks
                return save(*args, **kwargs | {"state_dict": weights})

        return save_pretrained

    @contextmanager
    def inside_window(self) -> Iterator[None]:
        """A block whose micro-batches do not end their window."""
        if not self._held:
            self.engine.framework.set_boundary(False)
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        if not self._held:
            self.engine.framework.set_boundary(True)

    def backward(self, loss: Tensor) -> None:
        """Run the backward of a loss that Accelerate has divided."""
        self.engine.framework.scaled_backward(loss)
        self.waits, self.ran = True, False

    def clip(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, *, now: bool) -> Tensor | None:
        """The norm now, and the clipping now or in the step; nothing inside a window.

        Raises:
            ContractError: `parameters` are not those that train.
        """
        if self._held or not self.waits:
            return None
        clipped = {
            id(parameter): parameter for parameter in ([parameters] if isinstance(parameters, Tensor) else parameters)
        }
        missing = [name for name, parameter in self._named if parameter.requires_grad and id(parameter) not in clipped]
        if missing and not self._are_all(clipped):
            raise ContractError(
                f"clip_grad_norm_ was called without {missing[0]}, but the norm is that of all parameters that train; "
                "pass model.parameters()"
            )
        if math.isinf(max_norm):
            return self.engine.gradients.norm()
        if now:
            return self.engine.gradients.clip(max_norm)
        self._max_norm = float(max_norm)
        return self.engine.gradients.norm()

    def _are_all(self, clipped: Mapping[int, Tensor]) -> bool:
        """Whether these are all parameters that train: as they were before `prepare`, or as a forward gathers them."""
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        before = sum(parameter.requires_grad and same_model(parameter, trained[0]) for parameter in clipped.values())
        return before == len(trained) or {id(parameter) for parameter in trained} <= clipped.keys()

    def require_no_gradients(self, call: str) -> None:
        """Refuse what would lose the gradients of a window.

        Raises:
            ContractError: There are some.
        """
        if self.waits:
            raise ContractError(
                f"{call} was called between backward and optimizer.step(), and a checkpoint has no gradients; call it "
                "after a step, or drop them before with accelerator.engine_of(model).discard()"
            )

    def step(self) -> None:
        """Update."""
        if self._held:
            raise ContractError(
                "optimizer.step() was called under no_sync, as by LocalSGD: the ranks would train different models, "
                "which a sharded model cannot; remove no_sync or LocalSGD"
            )
        self.last = self.engine.step(self._max_norm)
        self._begin()

    def drop(self) -> None:
        """Drop the gradients that wait for an update."""
        if self.waits:
            self.engine.discard()
            self._begin()

    def load(self, folder: str) -> None:
        """Continue from a checkpoint; the script itself finds the place in its data."""
        self.drop()
        self.engine.load(folder, data=False)
        restore_options(self.engine, folder)
        self.engine.framework.set_boundary(True)

    def close(self) -> None:
        """Close the engine; the model cannot be used afterwards."""
        self._detach()
        self.engine.close()

    def release(self) -> None:
        """Close the engine, and make the model plain again."""
        self.drop()
        self._detach()
        self.engine.framework.release()

    def _detach(self) -> None:
        self._hook.remove()
        for name in ("no_sync", "save_pretrained"):
            vars(self.model).pop(name, None)

    def _begin(self) -> None:
        self.waits, self._max_norm = False, ...
        self.engine.framework.set_boundary(True)


class EngineOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """What `prepare` returns for an optimizer: its step is the engine's."""

    def __init__(self, optimizer: torch.optim.Optimizer, trained: Trained) -> None:
        super().__init__(optimizer, device_placement=False)
        self._trained = trained

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update at the end of a window.

        Raises:
            ContractError: With a closure.
        """
        if closure is not None:
            raise ContractError("optimizer.step() takes no closure here; compute the loss before, and call backward")
        if self.gradient_state.sync_gradients:
            self._trained.step()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop gradients that no step has used; the engine zeroes those of an update."""
        if self.gradient_state.sync_gradients:
            self._trained.drop()

    def train(self) -> None:
        """Refuse an optimizer that keeps other weights for evaluation; do nothing for the rest.

        Raises:
            ContractError: It is one of schedulefree.
        """
        if callable(getattr(self.optimizer, "train", None)):
            raise ContractError(
                f"{type(self.optimizer).__name__} writes other weights into the parameters before and after an "
                "evaluation, which an engine shards and copies; use one of torch.optim with a schedule, or evaluate an "
                "average with accelerator.engine.weights.average()"
            )

    def eval(self) -> None:
        """As `train`."""
        self.train()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last update was skipped, for a gradient that was infinite or NaN."""
        return self._trained.last is not None and self._trained.last.skipped


class WatchedScheduler(AcceleratedScheduler):  # type: ignore[misc]
    """Accelerate's, which takes `num_processes` steps for each update, and says once if that has ended it early. Ranks
    that share samples count as one process.
    """

    sharing: Sharing
    split_batches: bool
    step_with_optimizer: bool
    _rose = False
    _said = False

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Take the steps of an update, before which it looks at the rates of the one that was made."""
        fast = self.step_with_optimizer and not self.split_batches and self._ranks() > 1
        if any(self.get_last_lr()):
            self._rose = True
        elif self._rose and fast and not self._said and self.gradient_state.sync_gradients:
            self._said = True
            _logger.warning(
                "the schedule has ended, and updates have a learning rate of 0: Accelerate steps a prepared scheduler "
                "num_processes times for each update; give it num_processes times as many steps, or do not prepare it"
            )
        if not self.sharing.on or self.split_batches or not self.step_with_optimizer:
            super().step(*args, **kwargs)
            return
        self.split_batches = True  # one step in each turn
        try:
            for _ in range(self._ranks() if self.gradient_state.sync_gradients else 1):
                super().step(*args, **kwargs)
        finally:
            self.split_batches = False

    def _ranks(self) -> int:
        return int(AcceleratorState().num_processes) // self.sharing.size


def watched(prepared: Any, sharing: Sharing) -> WatchedScheduler:
    """One that Accelerate has prepared."""
    follow(prepared.scheduler)
    prepared.__class__ = WatchedScheduler
    prepared.sharing = sharing
    return prepared  # type: ignore[no-any-return]
