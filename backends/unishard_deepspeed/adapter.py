"""The adapter of a `DeepSpeedEngine`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unishard.config import Config
from unishard.distributed.shards import Shard
from unishard.engine.adapter import EngineAdapter
from unishard.engine.optim.optimizer_state import StateSpec
from unishard.engine.results import Placement
from unishard.errors import CheckpointError
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

__all__ = ["DeepSpeedAdapter"]


class DeepSpeedAdapter(EngineAdapter):
    """What `Engine` asks, done on a `DeepSpeedEngine`."""

    def __init__(
        self,
        cfg: Config,
        engine: Any,
        inner: InnerOptimizer,
        device: torch.device,
        hooks: Sequence[RemovableHandle],
        conditional: ConditionalModules,
    ) -> None:
        super().__init__(engine.module, device, engine.optimizer)
        self._in_files = cfg.offload.params == "nvme"
        self._engine = engine
        self._inner = inner
        self._kind = kind_of(cfg)
        self._masters = MasterWeights(self._kind, inner)
        self._clipping = clipping_of(cfg, engine, inner)
        self._shards = Shards(cfg, engine, inner)
        self._hooks = hooks
        """On the model; they go with the engine."""
        self._conditional = conditional
        self._stale = StaleGradients(cfg, engine.optimizer)
        self._unused = UnusedParameters(cfg, engine.optimizer, inner, device, self._stale.broken)
        self._state = OptimizerState(engine.optimizer, inner, self._unused.masters, self._shards, self._kind)
        self.forward_is_collective = engine.zero_optimization_stage() == 3
        # Before DeepSpeed's own hooks on the outputs, which some stages fail in when a backward is not the engine's.
        # A function, not a method: copying the model, as for an average of its weights, must not copy the engine.
        self._output_hook = engine.module.register_forward_hook(lambda module, args, output: self._watch_early(module, output))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Through the `DeepSpeedEngine`."""
        self._conditional.gather()
        return self._engine(*args, **kwargs)

    def watch(self, output: Any) -> None:
        """Done by a hook on the model, before DeepSpeed's own hooks on the outputs."""

    def _watch_early(self, module: nn.Module, output: Any) -> None:
        if module is self.module:  # and no copy of it
            super().watch(output)

    def backward(self, loss: Tensor) -> None:
        """Through the `DeepSpeedEngine`, which divides nothing."""
        # A new tensor: DeepSpeed's hook on the model's outputs divides an output that is the loss itself by the accumulation steps,
        # as it runs before the one that `backward` sets on it (DeepSpeed 0.19.8, runtime/engine.py, _backward_prologue_per_tensor).
        self._engine.backward(loss.view(()), scale_wrt_gas=False)
        self._conditional.drop()
        self._unused.note()

    def begin(self, *, last: bool) -> None:
        """DeepSpeed learns of the end of a window from `step`."""

    def update(self, max_norm: float | None, divisor: float, *, finished: bool) -> tuple[float, bool]:
        """By `DeepSpeedEngine.step`."""
        self._unused.find()
        self._clipping.prepare(max_norm, divisor)
        with self._shards.finished():
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
            param_bytes=parameter_bytes(self.module.parameters()),
        )

    def finish_gradients(self) -> None:
        """Reduce now what `DeepSpeedEngine.step` would reduce."""
        self._unused.find()
        self._shards.reduce()

    def grad_shard(self, parameter: nn.Parameter, *, create: bool) -> Shard | None:
        """Of ZeRO's flat gradients."""
        if create:
            self._unused.take_up(parameter)
        return None if parameter in self._unused.left_out else self._shards.gradient(parameter)

    def master_shard(self, parameter: nn.Parameter) -> Shard:
        """Of ZeRO's flat master weights."""
        return self._shards.master(parameter)

    def refresh(self, parameter: nn.Parameter, full: Tensor) -> None:
        """The parameter in `precision.compute`."""
        self._shards.refresh(parameter, full)

    def drop_gradients(self) -> None:
        """Those in DeepSpeed's buffers too."""
        self._shards.drop()
        self._stale.clear()
        self._unused.forget()

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer:
        """That inside DeepSpeed's."""
        return self._inner.optimizer

    def settle(self) -> None:
        """Reshard whatever is gathered. Collective.

        Raises:
            CheckpointError: Parameters lie in files.
            BackendError: This DeepSpeed lacks a private name that it needs.
        """
        require("checkpoints", self._kind)
        if self._in_files:
            raise CheckpointError(
                "offload.params: nvme keeps the parameters in files, which DeepSpeed 0.19.8 reads and writes whole, through buffers of its "
                "own; set offload.params to cpu to save or load a checkpoint"
            )
        keep_parts_alone(self.optimizer, self._kind)

    def optimizer_shards(self, parameter: nn.Parameter) -> dict[str, Shard]:
        """Of the state that is kept by flat master weights."""
        return self._state.shards(parameter)

    def make_optimizer_state(self, specs: Mapping[nn.Parameter, StateSpec]) -> None:
        """By flat master weights."""
        self._state.make(specs)

    @torch.no_grad()
    def loaded(self) -> None:
        """Update every copy of the master weights, and let DeepSpeed find the optimizer's state. Collective."""
        self.drop_gradients()
        copy_masters(self.optimizer, self._inner, self._kind)
        find_states(self.optimizer, self._kind)

    def close(self) -> None:
        """Destroy the `DeepSpeedEngine`, and take the hooks off the model."""
        self._unused.remove()
        self._output_hook.remove()
        for hook in self._hooks:
            hook.remove()
        self._engine.destroy()
        forget(self._engine)
        del self._engine, self._inner, self._clipping, self._shards, self._state, self._stale, self._unused, self._conditional
