"""Engines without an optimizer: a model that is only evaluated, such as a frozen teacher."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unishard.config import Config
from unishard.distributed.broadcast import broadcast
from unishard.distributed.shards import Shard
from unishard.engine.engine import TrainingEngine
from unishard.engine.loop.frozen import tensors_in
from unishard.engine.loop.lockstep import Call
from unishard.engine.model.dtypes import DTYPES
from unishard.engine.model.inputs import cast_inputs
from unishard.engine.model.materialization import materialize
from unishard.engine.optim.optimizer_state import StateSpec
from unishard.errors import ContractError
from unishard.plugins.backend import Placement

__all__ = ["UntrainedEngine", "WholeEngine", "cast_to_compute", "replicate_for_inference"]


class _NoOptimizer:
    """In place of an optimizer: nothing is updated."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = []


class UntrainedEngine(TrainingEngine):
    """A prepared model that is never updated. A backend supplies what is still abstract."""

    _trains = False

    def __init__(self, cfg: Config, module: nn.Module, device: torch.device) -> None:
        super().__init__(cfg, module, _NoOptimizer(), device)
        module.eval()

    def _run(self, kind: str, call: Call) -> Any:
        # A loss through a frozen network needs the way back to that network's inputs, and only then a graph.
        if kind == "forward" and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in(call)):
            return self._forward(*call[0], **call[1])
        return super()._run(kind, call)

    def _begin_micro_batch(self, *, last: bool) -> None:
        """There are no windows."""

    def _backward(self, loss: Tensor) -> NoReturn:
        self._refuse("backward")

    def _update(self, *args: Any) -> NoReturn:
        self._refuse("step")

    def _finish_gradients(self) -> NoReturn:
        self._refuse("grad")

    def _gradient_part(self, parameter: nn.Parameter, *, create: bool) -> NoReturn:
        self._refuse("grad")

    def _drop_gradients(self) -> None:
        """There are none."""

    def _stepping(self) -> Any:
        return self._optimizer

    def _settle_state(self) -> None:
        """Nothing is gathered between two forwards, unless a subclass keeps it."""

    def _optimizer_parts(self, parameter: nn.Parameter) -> dict[str, Shard]:
        return {}

    def _make_optimizer_state(self, specs: Mapping[nn.Parameter, StateSpec]) -> None:
        """There is none."""

    def _state_loaded(self) -> None:
        """There is one copy, unless a subclass keeps another."""

    def _require_end_of_window(self, call: str) -> NoReturn:
        self._refuse(call)

    def _require_no_graph(self, call: str) -> None:
        self._require_open(call)

    @property
    def optimizer(self) -> NoReturn:
        """There is none.

        Raises:
            ContractError: Always.
        """
        self._refuse("optimizer")

    @property
    def lr(self) -> NoReturn:
        """There is none.

        Raises:
            ContractError: Always.
        """
        self._refuse("lr")

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: nothing is trained.

        Raises:
            ContractError: Always.
        """
        self._refuse("backward")

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: nothing is trained.

        Raises:
            ContractError: Always.
        """
        self._refuse("step")

    def follow(self, *args: Any) -> NoReturn:
        """Refused: nothing is trained.

        Raises:
            ContractError: Always.
        """
        self._refuse("follow")

    def set_trainable(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: nothing is trained.

        Raises:
            ContractError: Always.
        """
        self._refuse("set_trainable")

    def train(self, mode: bool = True) -> Self:
        """Put the model in evaluation mode, where it is already.

        Raises:
            ContractError: Training mode is asked for.
        """
        if mode:
            self._refuse("train")
        return super().train(False)

    def _refuse(self, call: str) -> NoReturn:
        self._require_open(call)
        raise ContractError(
            f"{call} is for an engine that trains, and this model was prepared with train=False; leave that out to train it, "
            "or call the engine that does"
        )


def cast_to_compute(tensors: Iterable[Tensor], cfg: Config) -> None:
    """Cast floating-point parameters, and freeze them all; buffers keep their format."""
    dtype = DTYPES[cfg.precision.compute]
    for tensor in tensors:
        if isinstance(tensor, nn.Parameter):
            tensor.requires_grad_(False)
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)


class WholeEngine(UntrainedEngine):
    """A whole model on each rank: without gradients and optimizer state there is nothing that these strategies would shard."""

    def __init__(self, cfg: Config, module: nn.Module, device: torch.device, hooks: Iterable[RemovableHandle]) -> None:
        super().__init__(cfg, module, device)
        self._forward_is_collective = False
        self._hooks = list(hooks)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._module(*args, **kwargs)

    def _master_part(self, parameter: nn.Parameter) -> Shard:
        return Shard(parameter.shape, parameter.detach())

    def _refresh(self, parameter: nn.Parameter, whole: Tensor) -> None:
        """There is one copy."""

    def placement(self) -> Placement:
        """What this rank holds."""
        return Placement(
            engine=type(self._module).__name__,
            units=(),
            master_dtypes=frozenset(),
            master_numel=0,
            param_bytes=sum(parameter.nbytes for parameter in self._module.parameters()),
        )

    def _release(self) -> None:
        for hook in self._hooks:
            hook.remove()


def replicate_for_inference(model: nn.Module, cfg: Config, device: torch.device, units: Iterable[str]) -> WholeEngine:
    """Bring rank 0's model whole onto every rank, in the compute format. Collective.

    Args:
        model: Whole on rank 0.
        cfg: What to run.
        device: Where this rank computes.
        units: Names of the modules that cast their floating-point inputs to a low compute format, as the root does: those that
            would be gathered together in training.
    """
    for parameter in model.parameters():  # one by one, so that nothing is whole in two formats
        materialize([parameter], device)
        broadcast([parameter])
        cast_to_compute([parameter], cfg)
    buffers = list(model.buffers())
    materialize(buffers, device)
    broadcast(buffers)
    casting = [] if cfg.precision.compute == "fp32" else [model, *map(model.get_submodule, units)]
    return WholeEngine(cfg, model, device, cast_inputs(casting, DTYPES[cfg.precision.compute]))
