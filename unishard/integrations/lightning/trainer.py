"""A strategy for Lightning's `Trainer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer

from unishard.config import Config
from unishard.engine.engine import Engine
from unishard.engine.optim.compute_groups import follow
from unishard.errors import ConfigError, ContractError, Problem
from unishard.integrations.lightning import common, saved

__all__ = ["UnishardStrategy"]

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_WEIGHTS = "trainer.strategy.engine.weights"
_REFUSED = {
    (BaseFinetuning,): f"freeze with {_WEIGHTS}.set_trainable(names, False) in on_train_epoch_start",
    (ModelPruning,): "prune before fit",
    (StochasticWeightAveraging, WeightAveraging): f"average with {_WEIGHTS}.average in on_train_start",
}
"""Callbacks that write weights or groups past the engine, and what to do instead."""


class UnishardStrategy(DDPStrategy):  # type: ignore[misc]
    """`Trainer(strategy=UnishardStrategy(cfg))`: an engine of unishard trains the module.

    Before `fit`, evaluation and prediction run the plain module, whole on each rank; after it, the engine's.
    """

    def __init__(self, cfg: Config | str | Path | Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Read the config; nothing starts.

        Args:
            cfg: What to run, as `unishard.load` takes it. The optimizer and the schedules are those of
                `configure_optimizers`.
            kwargs: Those of Lightning's `DDPStrategy` that concern processes: `accelerator`, `parallel_devices`,
                `cluster_environment`, `start_method`.

        Raises:
            ConfigError: The config is wrong.
        """
        self._cfg = common.config_of(cfg, kwargs)
        self._plugin = _EnginePrecision(self, common.precision_of(self._cfg))
        super().__init__(**kwargs)

    @property
    def engine(self) -> Engine:
        """The engine, from `fit` on."""
        if self.windows is None:
            raise ContractError("the engine is there once fit has begun; use it in on_train_start or later")
        return self.windows.engine  # type: ignore[no-any-return]

    @property
    def windows(self) -> Any:
        """The engine's `Windows`; None before `fit`. The module has them, for trainers that follow."""
        return getattr(self.lightning_module, "unishard_windows", None)

    @property
    def precision_plugin(self) -> Precision:
        """The engine's; Lightning sets the one of its own `precision`, which must agree."""
        return self._plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None:
            common.agree_on_precision(self._cfg, str(plugin.precision))

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """As Lightning's; ranks that share samples read the same."""
        return common.share_of(self, self._cfg)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As Lightning's; in the sum of a logged value, ranks that share samples count as one."""
        reduced = super().reduce(tensor, group, reduce_op)
        sharing = self._cfg.parallel.sharing
        return reduced / sharing if sharing > 1 and reduce_op == "sum" and group is None else reduced

    # -- set-up ------------------------------------------------------------------------------------

    def setup_distributed(self) -> None:
        """Start the process group as unishard does."""
        common.begin(self, self._cfg)
        super().setup_distributed()

    def setup(self, trainer: Trainer) -> None:
        """Prepare the module for `fit`."""
        self.accelerator.setup(trainer)
        if trainer.state.fn is TrainerFn.FITTING:
            self._prepare(trainer, self.lightning_module)
        elif self.windows is None:
            super().setup(trainer)

    def _prepare(self, trainer: Trainer, module: LightningModule) -> None:
        _refuse(self._cfg, trainer, module)
        if self._layer_sync is not None:
            self._layer_sync.apply(module)
        self.setup_optimizers(trainer)
        modes = [(part, part.training) for part in module.modules() if part is not module]
        # The backward of manual optimization is inside training_step, where modules are called one by one.
        methods = _STEPS[not module.automatic_optimization :]
        module.unishard_windows = common.prepared(self._cfg, module, self.optimizers, *methods)
        for each in self.lr_scheduler_configs:
            follow(each.scheduler)
        for part, training in modes:
            part.training = training

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """A block with a micro-batch that is not the last one of its step."""
        return self.windows.open()  # type: ignore[no-any-return]

    def on_train_end(self) -> None:
        """Wait for a save in the background, which may fail."""
        self.engine.wait()

    def on_exception(self, exception: BaseException) -> None:
        """Close the engine, so that the other ranks learn why; a refusal ends nothing."""
        if self.windows is not None and not isinstance(exception, ConfigError):
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
        """Nothing: the engine saves the weights."""
        return {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The options of the groups: the engine saves the rest."""
        return saved.options_of(self.engine)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write a directory."""
        saved.save(self.engine, self.broadcast(str(filepath)), checkpoint)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a directory; of a file of Lightning's own, only the weights can be used."""
        if not Path(checkpoint_path).is_dir():
            return super().load_checkpoint(checkpoint_path, weights_only)  # type: ignore[no-any-return]
        if self.windows is None:
            weights, rest = saved.read(checkpoint_path, weights_only=weights_only)
            return rest | {"state_dict": weights}
        strict = self.lightning_module.strict_loading
        return saved.load(self.engine, checkpoint_path, strict=strict, weights_only=weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights that the engine has not loaded."""
        if self.windows is None:
            super().load_model_state_dict(checkpoint, strict)
        elif checkpoint["state_dict"]:
            self.engine.weights.load(checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Give the groups their saved options."""
        (state,) = checkpoint["optimizer_states"]
        saved.restore_options(self.engine, state)


class _EnginePrecision(Precision):  # type: ignore[misc]
    """Where Lightning's loops call backward, clip and step."""

    def __init__(self, strategy: UnishardStrategy, precision: Any) -> None:
        self._strategy = strategy
        self.precision = precision

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, **options: Any) -> None:
        self._strategy.windows.backward(tensor, **options)

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: str = "norm") -> None:
        if clip_val > 0:
            if gradient_clip_algorithm != GradClipAlgorithmType.NORM:
                raise common.refuse_clip("gradient_clip_algorithm='value' has no equal on engines; remove it")
            self._strategy.windows.clip(clip_val)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        result = self._wrap_closure(model, optimizer, closure)
        self._strategy.windows.step()
        return result


def _refuse(cfg: Config, trainer: Trainer, module: LightningModule) -> None:
    """Raise a ConfigError that lists everything that would not train as written."""
    name, steps, clip = type(module).__name__, trainer.accumulate_grad_batches, trainer.gradient_clip_val
    accumulation, clips = cfg.training.gradient_accumulation_steps, cfg.training.gradient_clipping
    problems = []
    if hasattr(module, "unishard_windows"):
        problems.append(f"{name} was trained by fit already; build a new one, and pass ckpt_path to continue")
    if accumulation not in (1, steps):
        problems.append(
            f"training.gradient_accumulation_steps is {accumulation}, accumulate_grad_batches {steps}; remove it"
        )
    if clip and clips not in (None, clip):
        problems.append(f"training.gradient_clipping is {clips}, gradient_clip_val {clip}; remove one of them")
    if is_overridden("backward", module):
        problems.append(f"{name}.backward is not called: engines run the backward; remove it")
    if "training_step" in vars(module):
        problems.append("training_step is replaced, as by torch.compile(module); write `compile: per_block` instead")
    if type(trainer.strategy.checkpoint_io) is not TorchCheckpointIO:
        problems.append("engines write checkpoints themselves; remove the plugin of CheckpointIO")
    for callback in trainer.callbacks:
        problem = f"the callback {type(callback).__name__} does not know engines; remove it"
        problems += [f"{problem}, and {instead}" for kinds, instead in _REFUSED.items() if isinstance(callback, kinds)]
    if problems:
        raise ConfigError([Problem("", problem) for problem in problems])
