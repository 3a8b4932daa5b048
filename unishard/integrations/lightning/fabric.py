"""A strategy for Lightning's `Fabric`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import Precision
from lightning.fabric.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

import unishard
from unishard.config import Config
from unishard.engine.engine import Engine
from unishard.errors import CheckpointError, ContractError, NonFiniteError
from unishard.integrations.lightning import common, saved

__all__ = ["UnishardFabricStrategy"]


class _Entry(nn.Module):
    """What Fabric calls as the model: a call is that of the engine's routed model."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        self._call = engine.module.__call__

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


class UnishardFabricStrategy(DDPStrategy):  # type: ignore[misc]
    """`Fabric(strategy=UnishardFabricStrategy(cfg))`: each model that is set up with its optimizer gets an engine.

    A model that is set up without an optimizer is for inference.
    """

    def __init__(self, cfg: Config | str | Path | Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Read the config; nothing starts.

        Args:
            cfg: What to run, as `unishard.load` takes it.
            kwargs: Those of Fabric's `DDPStrategy` that concern processes: `accelerator`, `parallel_devices`,
                `cluster_environment`, `start_method`.

        Raises:
            ConfigError: The config is wrong.
        """
        self._cfg = common.config_of(cfg, kwargs)
        super().__init__(**kwargs)
        self._trained: list[tuple[_Entry, Optimizer, common.Windows]] = []
        self._backward_sync_control = self  # Fabric calls its `no_backward_sync`

    @property
    def precision(self) -> Precision:
        """Nothing: the engine casts; Fabric sets the one of its own `precision`, which must agree."""
        return Precision()

    @precision.setter
    def precision(self, precision: Precision | None) -> None:
        if precision is not None:
            common.agree_on_precision(self._cfg, str(precision.precision))

    def engine_of(self, optimizer: Optimizer | None = None) -> Engine:
        """The engine of an optimizer, or the only one."""
        return self._windows(optimizer=getattr(optimizer, "optimizer", optimizer)).engine

    def _windows(self, module: nn.Module | None = None, optimizer: Optimizer | None = None) -> common.Windows:
        matches = [
            ours
            for one, trained_optimizer, ours in self._trained
            if module in (None, one) and optimizer in (None, trained_optimizer)
        ]
        if len(matches) != 1:
            raise ContractError(
                f"{len(matches)} models are trained here; set a model up with its optimizer, as in "
                "model, optimizer = fabric.setup(model, optimizer), and name it if there are several, as in "
                "fabric.backward(loss, model=model)"
            )
        return matches[0]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """As Lightning's; ranks that share samples read the same."""
        return common.share_of(self, self._cfg)

    # -- set-up ------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Start the process group as unishard does."""
        common.begin(self, self._cfg)
        super().setup_environment()

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: the engine does."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Prepare a model for inference."""
        engine = unishard.prepare(module, self._cfg, train=False)
        engine.framework.routed()
        return _Entry(engine)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Refuse: an optimizer belongs to a model."""
        raise ContractError("set the optimizer up with its model: model, optimizer = fabric.setup(model, optimizer)")

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Prepare a model for training."""
        windows = common.prepared(self._cfg, module, optimizers)
        entry, kind, guarded = _Entry(windows.engine), type(optimizers[0]), optimizers[0].zero_grad
        members = {"__module__": kind.__module__, "zero_grad": lambda self, set_to_none=True: guarded(set_to_none)}
        optimizers[0].__class__ = type(kind.__name__, (kind,), members)  # Fabric's wrapper has the methods of the class
        self._trained.append((entry, optimizers[0], windows))
        return entry, optimizers, scheduler

    # -- the loop ----------------------------------------------------------------------------------

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """A block with a micro-batch that is not the last one of its step."""
        return self._windows(module).open() if enabled else nullcontext()

    def backward(self, tensor: Tensor, module: nn.Module | None, **options: Any) -> None:
        """Run the backward of the engine whose model the loss is of."""
        if module is None and len(self._trained) > 1:
            module = self._reached_by(tensor)
        self._windows(module).backward(tensor, **options)

    def _reached_by(self, loss: Tensor) -> nn.Module:
        reached = [entry for entry, _, _ in self._trained if entry.engine.framework.reached_by(loss)]
        if len(reached) != 1:
            raise ContractError(
                f"the loss reaches the parameters of {len(reached)} models, not of one; run the forward and the "
                "backward of a loss that trains only one of them inside `with "
                "fabric.strategy.engine_of(optimizer).weights.frozen():` with the optimizer of each other one"
            )
        return reached[0]

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Run the engine's step, after the closure if there is one."""
        result = closure() if (closure := kwargs.get("closure")) else None
        self._windows(optimizer=optimizer).step()
        return result

    def clip_gradients_norm(
        self, module: Any, optimizer: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = True
    ) -> Tensor:
        """The norm now; the step clips."""
        if norm_type != 2:
            raise common.refuse_clip(f"norm_type={norm_type} has no equal on engines; remove it")
        norm = self._windows(optimizer=optimizer).clip(max_norm)
        if error_if_nonfinite and not norm.isfinite():
            raise NonFiniteError(f"the norm of the gradients is {norm.item()}; pass error_if_nonfinite=False to skip")
        return norm

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Refuse."""
        raise common.refuse_clip(f"clip_val={clip_val} has no equal on engines; pass max_norm")

    # -- checkpoints -------------------------------------------------------------------------------

    def save_checkpoint(
        self, path: str | Path, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Write a directory with one for each model of the state; the rest goes with each of them."""
        entries = {name: value for name, value in state.items() if isinstance(value, _Entry)}
        if not entries or filter:
            raise CheckpointError(
                f"{path}: {'pass no filter' if filter else 'put the model into the state'}: fabric.save writes "
                "checkpoints of engines, with the optimizer of each model"
            )
        rest = {name: self._state_of(value) for name, value in state.items() if name not in entries}
        for name, entry in entries.items():
            saved.save(entry.engine, Path(path) / name, rest)

    def load_checkpoint(
        self, path: str | Path, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load what `save_checkpoint` has written; of a file of Fabric's own, only weights."""
        if not Path(path).is_dir():
            return super().load_checkpoint(path, state, strict, weights_only)  # type: ignore[no-any-return]
        entries = {name: value for name, value in (state or {}).items() if isinstance(value, _Entry)}
        if not entries:
            raise CheckpointError(f"{path}: put the model into the state under the name that it was saved with")
        for name, entry in entries.items():
            rest = saved.load(entry.engine, Path(path) / name, strict=strict, weights_only=weights_only)
        if strict and (missing := state.keys() - entries.keys() - rest.keys()):
            raise CheckpointError(f"{path} has no {', '.join(sorted(missing))}; pass strict=False")
        for name in (state.keys() - entries.keys()) & rest.keys():
            if isinstance(state[name], Optimizer):
                saved.restore_options(self.engine_of(state[name]), rest.pop(name))
            elif hasattr(state[name], "load_state_dict"):
                state[name].load_state_dict(rest.pop(name))
            else:
                state[name] = rest.pop(name)
        return dict(rest)

    def load_module_state_dict(self, module: _Entry, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Replace the weights."""
        module.engine.weights.load(state_dict, strict=strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The options of the groups: the engine saves the rest."""
        return saved.options_of(self.engine_of(optimizer))

    def _state_of(self, value: Any) -> Any:
        if isinstance(value, Optimizer):
            return self.get_optimizer_state(value)
        return value.state_dict() if hasattr(value, "state_dict") else value
