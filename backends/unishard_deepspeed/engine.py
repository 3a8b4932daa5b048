"""The training engine over `deepspeed.initialize`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unishard.config import Config
from unishard.distributed.shards import Shard
from unishard.engine import TrainingEngine
from unishard.engine.optim.optimizer_state import StateSpec
from unishard.errors import CheckpointError
from unishard.plugins.backend import Placement
from unishard_deepspeed.clipping import clipping_of
from unishard_deepspeed.conditional import ConditionalModules
from unishard_deepspeed.inner_optimizer import InnerOptimizer
from unishard_deepspeed.optimizer_state import OptimizerState
from unishard_deepspeed.patches.building import forget
from unishard_deepspeed.patches.optimizer_kind import kind_of, require
from unishard_deepspeed.patches.state import copy_masters, find_states, keep_parts_alone
from unishard_deepspeed.placement import MasterWeights, parameter_bytes, units
from unishard_deepspeed.shards import Shards
from unishard_deepspeed.stale_gradients import StaleGradients
from unishard_deepspeed.unused_parameters import UnusedParameters

__all__ = ["DeepSpeedTrainingEngine"]


class DeepSpeedTrainingEngine(TrainingEngine):
    """unishard's loop around a `DeepSpeedEngine`."""

    def __init__(
        self,
        cfg: Config,
        engine: Any,
        inner: InnerOptimizer,
        device: torch.device,
        hooks: Sequence[RemovableHandle],
        whole: ConditionalModules,
    ) -> None:
        super().__init__(cfg, engine.module, engine.optimizer, device)
        self._engine = engine
        self._inner = inner
        self._kind = kind_of(cfg)
        self._masters = MasterWeights(self._kind, inner)
        self._clipping = clipping_of(cfg, engine, inner)
        self._access = Shards(cfg, engine, inner)
        self._hooks = hooks
        """On the model; they go with the engine."""
        self._whole = whole
        self._stale = StaleGradients(cfg, engine.optimizer)
        self._unused = UnusedParameters(cfg, engine.optimizer, inner, device, self._stale.broken)
        self._state = OptimizerState(engine.optimizer, inner, self._unused.masters, self._access, self._kind)
        self._forward_is_collective = engine.zero_optimization_stage() == 3
        # Before DeepSpeed's own hooks on the outputs, which some stages fail in when a backward is not the engine's.
        # A function, not a method: copying the model, as for an average of its weights, must not copy the engine.
        self._output_hook = engine.module.register_forward_hook(lambda module, args, output: self._watch_early(module, output))

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        self._whole.gather()
        return self._engine(*args, **kwargs)

    def _watch(self, output: Any) -> None:
        """Done by a hook on the model."""

    def _watch_early(self, module: nn.Module, output: Any) -> None:
        if module is self._module:  # and no copy of it
            super()._watch(output)

    def _backward(self, loss: Tensor) -> None:
        # A new tensor: DeepSpeed's hook on the model's outputs divides an output that is the loss itself by the accumulation steps,
        # as it runs before the one that `backward` sets on it (DeepSpeed 0.19.8, runtime/engine.py, _backward_prologue_per_tensor).
        self._engine.backward(loss.view(()), scale_wrt_gas=False)
        self._whole.drop()
        self._unused.note()

    def _begin_micro_batch(self, *, last: bool) -> None:
        """DeepSpeed learns of the end of a window from `step`."""

    def _update(self, max_norm: float | None, divisor: float) -> tuple[float, bool]:
        self._unused.find()
        self._clipping.prepare(max_norm, divisor)
        with self._access.finished():
            outcome = self._clipping.step()
        self._unused.forget()
        self._stale.clear(updated=outcome[1])
        return outcome

    def placement(self) -> Placement:
        """What the engine really holds, read off its live tensors."""
        return Placement(
            engine=type(self._engine).__name__,
            units=units(self._engine),
            master_dtypes=self._masters.dtypes,
            master_numel=self._masters.numel,
            param_bytes=parameter_bytes(self._module.parameters()),
        )

    def _finish_gradients(self) -> None:
        self._unused.find()
        self._access.reduce()

    def _gradient_part(self, parameter: nn.Parameter, *, create: bool) -> Shard | None:
        if create:
            self._unused.take_up(parameter)
        return None if parameter in self._unused.left_out else self._access.gradient(parameter)

    def _master_part(self, parameter: nn.Parameter) -> Shard:
        return self._access.master(parameter)

    def _refresh(self, parameter: nn.Parameter, whole: Tensor) -> None:
        self._access.refresh(parameter, whole)

    def _drop_gradients(self) -> None:
        self._access.drop()
        self._stale.clear()
        self._unused.forget()

    def _stepping(self) -> torch.optim.Optimizer:
        return self._inner.optimizer

    def _settle_state(self) -> None:
        """Let nothing be gathered, so that parts are all there is. Collective.

        Raises:
            CheckpointError: Parameters lie in files.
            BackendError: DeepSpeed has not the names for it.
        """
        require("checkpoints", self._kind)
        if self._cfg.offload.params == "nvme":
            raise CheckpointError(
                "offload.params: nvme keeps the parameters in files, which DeepSpeed 0.19.8 reads and writes whole, through buffers of its "
                "own; set offload.params to cpu to save or load a checkpoint"
            )
        keep_parts_alone(self._optimizer, self._kind)

    def _optimizer_parts(self, parameter: nn.Parameter) -> dict[str, Shard]:
        return self._state.parts(parameter)

    def _make_optimizer_state(self, specs: Mapping[nn.Parameter, StateSpec]) -> None:
        self._state.make(specs)

    @torch.no_grad()
    def _state_loaded(self) -> None:
        """Bring every other copy up to masters that were written, and let DeepSpeed find the optimizer's state. Collective."""
        self._drop_gradients()
        copy_masters(self._optimizer, self._inner, self._kind)
        find_states(self._optimizer, self._kind)

    def _release(self) -> None:
        self._unused.remove()
        self._output_hook.remove()
        for hook in self._hooks:
            hook.remove()
        self._engine.destroy()
        forget(self._engine)
        del self._engine, self._inner, self._clipping, self._access, self._state, self._stale, self._unused, self._whole
