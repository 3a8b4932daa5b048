"""The training engine over `deepspeed.initialize`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unishard.backend import Placement
from unishard.config import Config
from unishard.engine import TrainingEngine
from unishard.engine.optimizer_state import StateSpec
from unishard.errors import CheckpointError
from unishard.parts import Part
from unishard_deepspeed import internals
from unishard_deepspeed.access import Access
from unishard_deepspeed.clipping import clipping_of
from unishard_deepspeed.internals import parts
from unishard_deepspeed.state import OptimizerState
from unishard_deepspeed.unused import Unused
from unishard_deepspeed.whole import WholeUnits

__all__ = ["DeepSpeedTrainingEngine"]


class DeepSpeedTrainingEngine(TrainingEngine):
    """unishard's loop around a `DeepSpeedEngine`."""

    def __init__(self, cfg: Config, engine: Any, device: torch.device, hooks: Sequence[RemovableHandle], whole: WholeUnits) -> None:
        super().__init__(cfg, engine.module, engine.optimizer, device)
        self._engine = engine
        self._clipping = clipping_of(engine, skips=cfg.training.nonfinite != "ignore")
        self._access = Access(engine)
        self._hooks = hooks
        """On the model; they go with the engine."""
        self._whole = whole
        self._unused = Unused(engine.optimizer, device)
        self._state = OptimizerState(engine.optimizer, self._unused.masters, self._access)
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

    def _begin_micro_batch(self, *, last: bool) -> None:
        """DeepSpeed learns of the end of a window from `step`."""

    def _update(self, max_norm: float | None, divisor: float) -> tuple[float, bool]:
        self._unused.find()
        self._clipping.prepare(max_norm, divisor)
        with self._access.finished():
            outcome = self._clipping.step()
        self._unused.forget()
        internals.clear_stale_gradients(self._optimizer)
        parts.clear_offloaded(self._optimizer)
        return outcome

    def placement(self) -> Placement:
        """What the engine really holds, read off its live tensors."""
        masters = internals.master_tensors(self._optimizer)
        return Placement(
            engine=type(self._engine).__name__,
            units=internals.units(self._engine),
            master_dtypes=frozenset(str(tensor.dtype).removeprefix("torch.") for tensor in masters),
            master_numel=sum(tensor.numel() for tensor in masters),
            param_bytes=internals.parameter_bytes(self._module.parameters()),
        )

    def _finish_gradients(self) -> None:
        self._unused.find()
        self._access.reduce()

    def _gradient_part(self, parameter: nn.Parameter, *, create: bool) -> Part | None:
        if create:
            self._unused.take_up(parameter)
        return None if parameter in self._unused.left_out else self._access.gradient(parameter)

    def _master_part(self, parameter: nn.Parameter) -> Part:
        return self._access.master(parameter)

    def _refresh(self, parameter: nn.Parameter, whole: Tensor) -> None:
        self._access.refresh(parameter, whole)

    def _drop_gradients(self) -> None:
        self._access.drop()
        self._unused.forget()

    def _stepping(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = internals.torch_optimizer(self._optimizer)
        return optimizer

    def _settle_state(self) -> None:
        """Let nothing be gathered, so that parts are all there is. Collective.

        Raises:
            CheckpointError: Parameters lie in files.
        """
        if self._cfg.offload.params == "nvme":
            raise CheckpointError(
                "offload.params: nvme keeps the parameters in files, which DeepSpeed 0.19.8 reads and writes whole, through buffers of its "
                "own; set offload.params to cpu to save or load a checkpoint"
            )
        internals.keep_parts_alone(self._optimizer)

    def _optimizer_parts(self, parameter: nn.Parameter) -> dict[str, Part]:
        return self._state.parts(parameter)

    def _make_optimizer_state(self, specs: Mapping[nn.Parameter, StateSpec]) -> None:
        self._state.make(specs)

    @torch.no_grad()
    def _state_loaded(self) -> None:
        """Bring every other copy up to masters that were written, and let DeepSpeed find the optimizer's state. Collective."""
        self._drop_gradients()
        internals.copy_masters(self._optimizer)
        internals.find_states(self._optimizer)

    def _release(self) -> None:
        self._unused.remove()
        self._output_hook.remove()
        for hook in self._hooks:
            hook.remove()
        self._engine.destroy()
        internals.forget(self._engine)
        del self._engine, self._clipping, self._access, self._state, self._unused, self._whole
