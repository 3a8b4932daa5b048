"""The adapter between `Engine` and a sharding engine: all that a backend's author writes for run time.

`Engine` holds the loop's contract; an adapter does one thing on its engine in each method. Subclass `EngineAdapter` for training, and
`InferenceAdapter` for a model that is prepared with `train=False` under a strategy that shards parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from unishard.distributed.shards import Shard
from unishard.engine.model.inputs import tensors_in
from unishard.engine.optim.optimizer_state import StateSpec
from unishard.engine.results import Placement

__all__ = ["EngineAdapter", "InferenceAdapter"]


class InferenceAdapter(ABC):
    """A sharded model that is only evaluated. `EngineAdapter` adds training."""

    forward_is_collective = True
    """Whether a forward without a graph needs the other ranks; `lockstep` repeats calls on finished ranks where it does."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        """Hold the model.

        Args:
            module: The user's model, sharded in place, under its own parameter names.
            device: Where this rank computes.
        """
        self.module = module
        self.device = device

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of one micro-batch through the sharded model."""

    @abstractmethod
    def master_shard(self, parameter: nn.Parameter) -> Shard:
        """This rank's shard of a master weight, or of a frozen parameter itself, as a view of live memory."""

    @abstractmethod
    def refresh(self, parameter: nn.Parameter, full: Tensor) -> None:
        """After a master weight was edited: update every other copy of it, of any dtype, to `full` (fp32)."""

    @abstractmethod
    def placement(self) -> Placement:
        """What the engine holds, read from its live tensors, not from the config. `prepare` compares it with the config."""

    @abstractmethod
    def close(self) -> None:
        """Release the engine's resources. Called once."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own `generate`; each rank makes the same number of forwards."""
        return self.module.generate(*args, **kwargs)  # type: ignore[operator]

    def settle(self) -> None:  # noqa: B027 (nothing to do where nothing stays gathered)
        """Before state is read or written, between two updates: reshard whatever is gathered. Collective.

        Raises:
            CheckpointError: The state cannot be read in shards; says what to change in the config.
        """

    def loaded(self) -> None:  # noqa: B027 (nothing to do where there is one copy)
        """Master weights, frozen parameters and optimizer state were written in place: update every other copy. Collective."""

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """A block in which no parameter requires a gradient."""
        trainable = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        try:
            for parameter in trainable:
                parameter.requires_grad_(False)
            yield
        finally:
            for parameter in trainable:
                parameter.requires_grad_(True)


class EngineAdapter(InferenceAdapter):
    """A sharded model and its optimizer."""

    on_gradient: Callable[[Tensor], None]
    """Set by `Engine`: to be called with the gradient of each output of a training forward; see `watch`."""

    def __init__(self, module: nn.Module, device: torch.device, optimizer: Any) -> None:
        """Hold the model and the optimizer.

        Args:
            module: The user's model, sharded in place, under its own parameter names.
            device: Where this rank computes.
            optimizer: What steps; its `param_groups` hold the live learning rates.
        """
        super().__init__(module, device)
        self.optimizer = optimizer

    # -- one accumulation window ------------------------------------------------------------------------------------------

    @abstractmethod
    def begin(self, *, last: bool) -> None:
        """Before the forward of a micro-batch: whether it is the last of its window, so that the engine can time its collectives."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of a loss that is divided already."""

    @abstractmethod
    def finish_gradients(self) -> None:
        """At the end of a window: reduce what is not reduced yet, so that gradients are those that `update` uses. Collective.

        Called at most once in a window, and only where somebody reads or edits gradients.
        """

    @abstractmethod
    def update(self, max_norm: float | None, divisor: float, *, finished: bool) -> tuple[float, bool]:
        """End the window: divide the gradients, clip them, step the optimizer, and zero the gradients. Collective.

        Args:
            max_norm: Clip the divided gradients to this norm; None for no clipping.
            divisor: Divide the accumulated gradients by this, mostly 1.
            finished: Whether `finish_gradients` was called in this window; else reduce the gradients first.

        Returns:
            The global L2 norm of the divided gradients before clipping (fp32), and whether the update was made. Unless
            `training.nonfinite` is `ignore`, an update whose norm is not finite is skipped and changes neither parameters nor state.
        """

    @abstractmethod
    def drop_gradients(self) -> None:
        """Drop all gradients of the window, reduced or not, and a forward without a backward."""

    # -- shards -----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def grad_shard(self, parameter: nn.Parameter, *, create: bool) -> Shard | None:
        """This rank's shard of a finished gradient, as a view of live memory.

        Args:
            parameter: A trainable one.
            create: Whether a parameter without a gradient gets one of zeros; else the answer is None for it, on every rank.
        """

    @abstractmethod
    def optimizer_shards(self, parameter: nn.Parameter) -> dict[str, Shard]:
        """This rank's shards of the optimizer's state of a parameter, by the optimizer's own keys.

        Live memory where a tensor has the parameter's shape. A number, such as a step count, is a shard of shape () with a copy in
        fp32 in host memory. Empty for a parameter that was never updated, and where this rank holds nothing of it.
        """

    @abstractmethod
    def make_optimizer_state(self, specs: Mapping[nn.Parameter, StateSpec]) -> None:
        """Forget all optimizer state and make that of these parameters anew: zeros, and the numbers as given.

        Optimizers make theirs in the first step, so a fresh engine has none to load into.
        """

    # -- with defaults ----------------------------------------------------------------------------------------------------

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer that makes the updates, whatever is wrapped around it."""
        optimizer: torch.optim.Optimizer = self.optimizer
        return optimizer

    def set_trainable(self, names: Sequence[str], trainable: bool) -> None:
        """Freeze parameters or make them trainable, between two windows. Those without a gradient must not move in an update."""
        for name in names:
            self.module.get_parameter(name).requires_grad_(trainable)

    def watch(self, output: Any) -> None:
        """Call `on_gradient` with the gradient of each tensor in an output of `forward`.

        An engine that puts hooks of its own on outputs calls this earlier than `Engine` does, and makes this method do nothing.
        """
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self.on_gradient)  # type: ignore[no-untyped-call]

    def leaves(self) -> Iterable[Tensor]:
        """The tensors on which autograd accumulates this model's gradients."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]
