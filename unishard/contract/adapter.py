"""The interface between `Engine` and a sharding engine: everything that a backend implements for run time.

`Engine` defines the training loop; each method does one operation on the sharding engine. An adapter is a
`ShardedModel`, and its `Updates` if it trains: a model prepared with `train=False` is the same one without them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from unishard.contract.optimizer_state import OptimizerState, TorchOptimizerState
from unishard.contract.results import Placement
from unishard.contract.trainable import frozen_parameters, set_requires_grad
from unishard.contract.units import Unit
from unishard.distributed.host_read import HostRead
from unishard.distributed.nested_tensors import hook_gradients
from unishard.distributed.shards import Shard, SteppedShard


class ShardedModel(ABC):
    """A model on an engine, for training and for inference."""

    forward_is_collective = True
    """Whether a forward without a graph needs the other ranks; if so, `lockstep` repeats calls on finished ranks."""
    updates: Updates | None = None
    """What trains it, which the backend sets; None for inference."""

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
        """Run the forward of one micro-batch through the sharded model."""

    @abstractmethod
    def master_shard(self, parameter: nn.Parameter) -> Shard:
        """This rank's shard of a master weight, or of a frozen parameter, as a view of live memory."""

    def weights_written(self, full: Mapping[nn.Parameter, Tensor] | None = None) -> None:  # noqa: B027 (one copy)
        """Update every copy of master weights and frozen parameters that were written in place. Collective.

        Args:
            full: The full values of those that were written, which every rank has; None if any may have been written.
        """

    def gathered_modules(self) -> Iterable[Unit]:
        """Modules outside units whose parameters are gathered, by a collective, each time that they are entered."""
        return ()

    def weight_memory(self) -> Iterable[Tensor]:
        """All tensors of the engine that have the memory of this rank's weights: parameters, their shards, master
        weights, and buffers that hold several.

        Whoever gives their `data` other memory moves the weights.
        """
        return ()

    @abstractmethod
    def placement(self) -> Placement:
        """Report what the engine holds, from its live tensors, not from the config.

        `prepare` compares it with the config.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the engine's resources, and first close `updates`. Called once."""

    def releasing(self) -> Callable[[], None]:
        """What the modules need once the engine is closed, so that they can be sharded again.

        Raises:
            BackendError: They cannot.
        """
        return lambda: None

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's `generate`; every rank makes the same number of forwards."""
        return self.module.generate(*args, **kwargs)  # type: ignore[operator]

    def reshard_all(self) -> None:  # noqa: B027 (nothing to do if nothing stays gathered)
        """Reshard all gathered parameters. Called between two updates, before state is read or written. Collective.

        Raises:
            CheckpointError: The state cannot be read as shards; says what to change in the config.
        """

    def unsharded(self, names: Sequence[str]) -> AbstractContextManager[None]:
        """A block in which these parameters are full tensors that autograd knows, also outside the forward of their
        modules. Collective.

        A gradient that reaches them in a `backward` inside the block is accumulated and reduced like any other,
        whenever it comes.

        Args:
            names: Names in the user's model, the same and in the same order on every rank. No state is read or written
                in the block.
        """
        return nullcontext()

    def reads_shard(self, error: RuntimeError) -> str | None:
        """Recognize the error of an operation on a parameter that is sharded at the time.

        Returns:
            None for other errors; else what helps besides `engine.weights.unsharded`, or nothing.
        """
        return None


class Updates(ABC):
    """The gradients of a sharded model, and its optimizer."""

    on_gradient: Callable[[Tensor], None]
    """Set by `Engine`: called with the gradient of each output of a training forward; see `watch`."""
    read_gradient: Callable[[nn.Parameter], Tensor | None]
    """Set by `Engine`: what `parameter.grad` is to be in the script, for engines that hold another gradient there or
    none; None where it is not final. Collective."""
    shared_parameters: Mapping[str, nn.Parameter]
    """By name, the parameters that can train and whose gradients are right only if all ranks have one, or none: those
    that were trainable in `prepare`, but not those that any rank may skip (of conditional modules, or all where the
    engine adds zeros for missing gradients)."""

    def __init__(self, model: ShardedModel, optimizer: Any) -> None:
        """Hold the model and the optimizer.

        Args:
            model: What trains.
            optimizer: The optimizer that steps; its `param_groups` hold the live learning rates.
        """
        self.model = model
        self.optimizer = optimizer
        self.shared_parameters = {name: each for name, each in model.module.named_parameters() if each.requires_grad}

    # -- one accumulation window -------------------------------------------------------------------

    @abstractmethod
    def begin(self, *, last: bool) -> None:
        """Prepare for the forward of a micro-batch; `last` in its window tells the engine when to run its
        collectives.
        """

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of a loss that is already divided."""

    @abstractmethod
    def finish_gradients(self) -> None:
        """Reduce all remaining gradients at the end of a window, so that they are those that `update` uses. Collective.

        Called at most once in a window, and only if the user reads or edits gradients.
        """

    @abstractmethod
    def update(self, max_norm: float | None, divisor: float, *, finished: bool) -> tuple[float | HostRead, bool | None]:
        """End the window: divide the gradients, clip them, step the optimizer, and zero the gradients. Collective.

        Args:
            max_norm: Clip the divided gradients to this norm; None for no clipping.
            divisor: Divide the accumulated gradients by this, mostly 1.
            finished: Whether `finish_gradients` was called in this window; if not, reduce the gradients first.

        Returns:
            The global L2 norm of the divided gradients before clipping (fp32), and whether the update was made. Unless
            `training.nonfinite` is `ignore`, an update with a non-finite norm is skipped and changes neither parameters
            nor state. An adapter whose device does that without the host returns the norm as a `HostRead`, and None: it
            was made if the norm is finite.
        """

    @abstractmethod
    def drop_gradients(self) -> None:
        """Drop all gradients of the window, reduced or not, and a forward that had no backward."""

    # -- shards ------------------------------------------------------------------------------------

    @abstractmethod
    def grad_shard(self, parameter: nn.Parameter, *, create: bool) -> Shard | None:
        """This rank's shard of a finished gradient, as a view of live memory.

        Args:
            parameter: A trainable parameter.
            create: Whether to create a zero gradient for a parameter without one; if not, the result is None on every
                rank.
        """

    # -- with defaults -----------------------------------------------------------------------------

    def grad_norm(self) -> Tensor | None:
        """The global L2 norm of the finished gradients, not divided yet, which the coming `update` uses again; None if
        the engine takes it only there. Collective.
        """
        return None

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer:
        """The innermost torch optimizer, which makes the updates."""
        optimizer: torch.optim.Optimizer = self.optimizer
        return optimizer

    @cached_property
    def optimizer_state(self) -> OptimizerState:
        """This rank's shards of the optimizer's state, by parameter."""
        return TorchOptimizerState(self.torch_optimizer, self.model.master_shard)

    def stepped(self) -> Sequence[Tensor]:
        """All tensors that the torch optimizer steps on this rank, whether they have a gradient or not, in its
        order.
        """
        return [tensor for group in self.torch_optimizer.param_groups for tensor in group["params"]]

    def stepped_memory(self) -> Callable[[], Mapping[nn.Parameter, SteppedShard]]:
        """Prepare to say, inside a step of the torch optimizer, which memory it steps.

        Called once, before any step, for optimizers that must know where a shard lies.

        Returns:
            A function for the optimizer to call in `step`: by parameter, where this rank's shard of it is then. Of all
            parameters that this call of `step` changes, and no others: the same ones on all ranks that share them,
            those of which this rank has no element included. Not collective.
        """
        return lambda: {
            parameter: SteppedShard(parameter)
            for group in self.torch_optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        }

    def set_trainable(self, names: Sequence[str], trainable: bool) -> None:
        """Freeze parameters or make them trainable, between two windows.

        Updates must not change parameters without a gradient.
        """
        set_requires_grad(self.model.module, names, trainable)

    def frozen(self) -> AbstractContextManager[None]:
        """A block in which no parameter requires a gradient."""
        return frozen_parameters(self.model.module)

    def watch(self, output: Any) -> None:
        """Call `on_gradient` with the gradient of each tensor in an output of `forward`.

        An adapter whose engine registers its own hooks on outputs calls `hook_gradients` before those, and not here.
        """
        hook_gradients(output, self.on_gradient)

    def input_gradients(self, *, graph: bool) -> None:  # noqa: B027 (most engines can)
        """Called when `torch.autograd.grad` of an output is about to run through the model, before it uses parameters.

        Args:
            graph: Whether the gradients get a graph (`create_graph=True`), for a backward through them, such as a
                gradient penalty's.

        Raises:
            ContractError: The engine cannot do this; says where it works.
        """

    def gradients_in_forward(self) -> None:  # noqa: B027 (most engines can)
        """Called when the forward of the model computes gradients through its own modules, such as forces of an energy.

        Raises:
            ContractError: The engine cannot do this; says where it works.
        """

    calls_in_update = 1
    """How often an update calls the step of the torch optimizer."""

    reduces_each_backward = True
    """Whether gradients are reduced in each backward, and not only in the last one of a window or in `update`."""

    def without_gradient(self) -> Collection[str]:
        """Names of the `shared_parameters` that have no gradient of this rank in the window, after its last
        backward.
        """
        return [name for name, parameter in self.shared_parameters.items() if parameter.grad is None]

    @property
    def gradient_order(self) -> str:
        """A hash of the order in which the gradients of the window came; empty if they are reduced in an order of their
        own.
        """
        return ""

    def leaves(self) -> Mapping[str, Tensor]:
        """By name, the tensors on which autograd accumulates the gradients of this model's parameters.

        A parameter that no forward has used yet may be missing.
        """
        return dict(self.model.module.named_parameters())

    def close(self) -> None:  # noqa: B027 (nothing to do if only the model has resources)
        """Release what updates need, before the model is closed."""
