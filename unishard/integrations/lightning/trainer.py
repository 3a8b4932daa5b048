"""A strategy for Lightning's `Trainer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer

import unishard
from unishard.config import Config
from unishard.engine.engine import Engine
from unishard.errors import ConfigError, ContractError, Problem
from unishard.integrations.lightning import saved
from unishard.integrations.lightning.agreement import agree_on_precision, begin, config_of, precision_of
from unishard.integrations.lightning.windows import Windows, parts_of, refuse_clip

__all__ = ["UnishardStrategy"]

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_REFUSED: dict[type, str] = {
    BaseFinetuning: "freeze with trainer.strategy.engine.set_trainable(names, False) in on_train_epoch_start",
    ModelPruning: "prune before fit",
    StochasticWeightAveraging: "average with trainer.strategy.engine.ema(decay) in on_train_start",
    WeightAveraging: "average with trainer.strategy.engine.ema(decay) in on_train_start",
}
"""Callbacks that write weights or groups past the engine, and what to do instead."""


class UnishardStrategy(DDPStrategy):  # type: ignore[misc]  # Lightning's types are not read
    """`Trainer(strategy=UnishardStrategy(cfg))`: an engine of unishard trains the module.

    Before `fit`, evaluation and prediction run the plain module, whole on each rank; after it, the engine's.
    """

    def __init__(self, cfg: Config | str | Path | Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Read the config; nothing starts.

        Args:
            cfg: What to run, as `unishard.load` takes it. The optimizer and the schedules are those of
                `configure_optimizers`.
            kwargs: Those of Lightning's `DDPStrategy` that concern processes, such as `cluster_environment`.

        Raises:
            ConfigError: The config is wrong.
        """
        self._cfg = config_of(cfg)
        self._plugin = _EnginePrecision(self, precision_of(self._cfg))
        super().__init__(**kwargs)

    @property
    def engine(self) -> Engine:
        """The engine, from `fit` on."""
        return self._windows.engine

    @property
    def _windows(self) -> Windows:
        if not self._trains:
            raise ContractError("the engine is there once fit has begun; use it in on_train_start or later")
        found: Windows = self.lightning_module._unishard_windows
        return found

    @property
    def _trains(self) -> bool:
        return hasattr(self.lightning_module, "_unishard_windows")

    @property
    def precision_plugin(self) -> Precision:
        """The engine's; Lightning sets the one of its own `precision`, which must agree."""
        return self._plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None:
            agree_on_precision(self._cfg, str(plugin.precision))

    # -- set-up ------------------------------------------------------------------------------------

    def setup_distributed(self) -> None:
        """Start the process group as unishard does."""
        begin(self, self._cfg)
        super().setup_distributed()

    def setup(self, trainer: Trainer) -> None:
        """Prepare the module for `fit`."""
        fits = trainer.state.fn is TrainerFn.FITTING
        if not fits and not self._trains:
            super().setup(trainer)
            return
        self.accelerator.setup(trainer)
        if fits:
            self._prepare(trainer, self.lightning_module)

    def _prepare(self, trainer: Trainer, module: LightningModule) -> None:
        _refuse(self._cfg, trainer, module)
        if self._layer_sync is not None:
            self._layer_sync.apply(module)
        self.setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            what = f"configure_optimizers returns {len(self.optimizers)} optimizers; an engine has one, with groups"
            raise ConfigError([Problem("optimizer", what)])
        modes = [(part, part.training) for part in module.modules() if part is not module]
        engine = unishard.prepare(module, self._cfg, self.optimizers[0], reseed=False)
        for part, training in modes:
            part.training = training
        # The backward of manual optimization is inside training_step, where modules are called one by one.
        engine.routed(*_STEPS[not module.automatic_optimization :], parts=parts_of(module))
        module._unishard_windows = Windows(engine)

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """A block with a micro-batch that is not the last one of its step."""
        return self._windows.open()

    def on_exception(self, exception: BaseException) -> None:
        """Close the engine, so that the other ranks learn why; a refusal ends nothing."""
        if self._trains and not isinstance(exception, ConfigError):
            self.engine.__exit__(type(exception), exception, None)

    def teardown(self) -> None:
        """Leave the module on the engine's device, where it can still be evaluated."""
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # -- checkpoints -------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether a checkpoint is loaded into the prepared module."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing: the engine saves the weights; before fit, those of the plain module."""
        whole: dict[str, Any] = {} if self._trains else super().lightning_module_state_dict()
        return whole

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The options of the groups: the engine saves the rest."""
        return saved.options_of(self.engine)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write a directory."""
        saved.save(self.engine, self.broadcast(str(filepath)), checkpoint)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a directory; of a file of Lightning's own, only the weights can be used."""
        if not Path(checkpoint_path).is_dir():
            found: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        elif self._trains:
            strict = self.lightning_module.strict_loading
            found = saved.load(self.engine, checkpoint_path, strict=strict, weights_only=weights_only)
        else:
            weights, rest = saved.read(checkpoint_path, weights_only=weights_only)
            found = rest | {"state_dict": weights}
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights that the engine has not loaded."""
        if not self._trains:
            super().load_model_state_dict(checkpoint, strict)
        elif checkpoint["state_dict"]:
            self.engine.load_weights(checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Give the groups their saved options."""
        (state,) = checkpoint["optimizer_states"]
        saved.restore_options(self.engine, state)


class _EnginePrecision(Precision):  # type: ignore[misc]
    """Where Lightning's loops call backward, clip and step."""

    def __init__(self, strategy: UnishardStrategy, precision: Any) -> None:
        self._strategy = strategy
        self.precision = precision

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self._strategy._windows.backward(tensor, *args, **kwargs)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        if clip_val > 0:
            if gradient_clip_algorithm != GradClipAlgorithmType.NORM:
                raise refuse_clip("gradient_clip_algorithm='value' has no equal on engines; remove it")
            self._strategy._windows.clip(clip_val)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        result = self._wrap_closure(model, optimizer, closure)
        self._strategy._windows.step()
        return result


def _refuse(cfg: Config, trainer: Trainer, module: LightningModule) -> None:
    """Raise ConfigError with all that would not train as written."""
    ours, clips = cfg.training, trainer.gradient_clip_val
    problems = []
    if hasattr(module, "_unishard_windows"):
        what = f"{type(module).__name__} was trained by fit already; build a new one, and pass ckpt_path to continue"
        problems.append(Problem("", what))
    if ours.gradient_accumulation_steps not in (1, trainer.accumulate_grad_batches):
        what = f"is {ours.gradient_accumulation_steps}, but Trainer(accumulate_grad_batches="
        what += f"{trainer.accumulate_grad_batches}) decides; remove it"
        problems.append(Problem("training.gradient_accumulation_steps", what))
    if clips and ours.gradient_clipping not in (None, clips):
        what = f"is {ours.gradient_clipping}, but Trainer(gradient_clip_val={clips}); remove one of them"
        problems.append(Problem("training.gradient_clipping", what))
    if is_overridden("backward", module):
        what = f"{type(module).__name__}.backward is not called: engines run the backward; remove it"
        problems.append(Problem("", what))
    if getattr(module, "_compiler_ctx", None) is not None:
        what = "the module is compiled; pass it as it is, and write `compile: per_block` in the config"
        problems.append(Problem("compile", what))
    for callback in trainer.callbacks:
        for kind in filter(_REFUSED.get, type(callback).__mro__):
            what = f"the callback {type(callback).__name__} does not know engines; remove it, and {_REFUSED[kind]}"
            problems.append(Problem("", what))
    if problems:
        raise ConfigError(problems)
