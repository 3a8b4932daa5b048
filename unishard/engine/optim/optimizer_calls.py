"""Who calls an engine's optimizer: the engine; calls of others are refused, or do nothing where they do no harm."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch

from unishard.contract.adapter import Updates
from unishard.engine.optim.public_optimizer import GuardedOptimizer, PublicOptimizer
from unishard.engine.optim.stepping import OwnCalls, forget, watch
from unishard.errors import ContractError
from unishard.matrices.whole_tensors import WholeTensors


class OptimizerCalls:
    """Separates the engine's calls of its optimizer from those of others, which act differently on each engine, or on
    none.
    """

    def __init__(
        self,
        updates: Updates,
        built: torch.optim.Optimizer,
        model_class: str,
        require_no_gradients: Callable[[str], None],
        wrote: Callable[[], None],
        *,
        whole: bool,
    ) -> None:
        """From now on refuse the calls of others.

        Args:
            updates: Of the sharded model.
            built: The optimizer that was passed to `prepare` or built for it; the user may hold it.
            model_class: Class of the model before it was sharded.
            require_no_gradients: Raises if the engine holds gradients that the named call would drop.
            wrote: Called after weights were written.
            whole: Whether this rank has all of the optimizer's state.
        """
        self._own = own = OwnCalls()
        self.public = PublicOptimizer(updates, own, require_no_gradients)
        """`engine.optimizer`."""
        self._real, self._wrote = updates.torch_optimizer, wrote
        modes = {}
        if isinstance(self._real, WholeTensors) and self._real.modes:
            modes = {"train": partial(self.train_mode, True), "eval": partial(self.train_mode, False)}
        vars(self.public).update(modes)
        self._guarded = GuardedOptimizer(built, own, require_no_gradients, whole=whole, modes=modes)
        optimizers = built, updates.optimizer, self._real
        self._number = watch(updates.model.module, model_class, optimizers, own)

    def own(self) -> AbstractContextManager[None]:
        """A block in which the engine calls its optimizer."""
        return self._own.run()

    def require_one_schedule(self, *, writes: bool) -> None:
        """Check before an update that only one schedule writes the learning rates.

        Args:
            writes: Whether the engine's schedule does.

        Raises:
            ContractError: So does one that was built on `engine.optimizer`.
        """
        if writes and self.public.scheduled:
            raise ContractError(
                "a scheduler was built on engine.optimizer, but the engine's own schedule writes the learning rates "
                "after each update; use only one: remove `scheduler` from the config, or pass a function that builds "
                "yours, as in unishard.prepare(model, cfg, scheduler=lambda optimizer: ...)"
            )

    def updated(self) -> None:
        """Tell schedulers that were built on `engine.optimizer` of an update; they warn if there was none."""
        if self.public.scheduled:
            with self._own.run():
                self.public.step()

    def train_mode(self, training: bool) -> None:
        """Put an optimizer that has modes, as schedule-free ones, into one, with the weights of it. Collective."""
        with self._own.run():
            if isinstance(self._real, WholeTensors) and self._real.train_mode(training):
                self._wrote()

    def close(self) -> None:
        """Refuse nothing any longer."""
        self._guarded.remove()
        forget(self._number, self._own)
