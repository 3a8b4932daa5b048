"""Accelerate's `Accelerator`, whose models run on unishard's engines."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.utils import DDPCommunicationHookType, DynamoBackend, recursively_apply
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from unishard.config import Config
from unishard.engine.engine import Engine
from unishard.engine.optim.compute_groups import follow
from unishard.engine.prepare import prepare
from unishard.errors import CheckpointError, ConfigError, ContractError, Problem
from unishard.integrations import backward_options
from unishard.integrations.accelerate.configuring import (
    agreed,
    config_of,
    shared_samples,
    unsharded_in_one_process,
    with_batch_size,
)
from unishard.integrations.accelerate.sharing import Sharing
from unishard.integrations.accelerate.trained import EngineOptimizer, Trained, watched
from unishard.integrations.saving import replace_checkpoint

__all__ = ["Accelerator"]

_logger = logging.getLogger("unishard")

_FOLDER = "unishard_{}"
"""Where a model's checkpoints are, inside the folder of `save_state`."""
_HANDLERS = ("ddp_handler", "scaler_handler", "autocast_handler")
_NO_HOOK = DDPCommunicationHookType.NO
_PLUGINS = ("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin", "torch_tp_plugin")


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """Accelerate's own for data, trackers and processes; models and their optimizers are those of an engine.

    A model is trained by the engine as soon as its optimizer is prepared; one without an optimizer stays as it is.
    """

    def __init__(self, cfg: Config | str | Path | Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Read the config.

        Args:
            cfg: A config, a file or mapping with one, or a file of `accelerate config`. None: the file that
                ACCELERATE_UNISHARD_CONFIG names, what `unishard launch` was given, or what `accelerate launch` has set.
            kwargs: For Accelerate's own.

        Raises:
            ConfigError: There is no config, it cannot be used, or an argument contradicts it.
        """
        if plugins := [name for name in _PLUGINS if kwargs.get(name) is not None]:
            raise ConfigError(
                [Problem(plugins[0], "is not for unishard's Accelerator; write what it says in the config")]
            )
        precision = kwargs.pop("mixed_precision", None) or os.environ.get("ACCELERATE_MIXED_PRECISION")
        arguments = {
            "precision.compute": None if precision == "no" else precision,
            "training.gradient_accumulation_steps": kwargs.get("gradient_accumulation_steps"),
            **shared_samples(kwargs.pop("parallelism_config", None), "parallelism_config"),
        }
        config = agreed(config_of(cfg, precision), arguments)
        if "gradient_accumulation_plugin" not in kwargs:
            kwargs["gradient_accumulation_steps"] = config.training.gradient_accumulation_steps
        compute = config.precision.compute
        kwargs.setdefault("cpu", not torch.cuda.is_available())
        super().__init__(mixed_precision="no" if compute == "fp32" else compute, **kwargs)
        self._begin(config)

    def _begin(self, config: Config) -> None:
        self.config = unsharded_in_one_process(config)
        if self.state.dynamo_plugin.backend != DynamoBackend.NO:
            raise ConfigError(
                [Problem("dynamo_backend", "is not for unishard's Accelerator; set compile in the config")]
            )
        if ignored := [name for name in _HANDLERS if _changes_training(getattr(self, name, None))]:
            _logger.warning("the engine has no use for %s of Accelerate; the config says how it trains", *ignored[:1])
        self._gathers_once = False
        self._models: list[nn.Module]
        self._optimizers: list[Any]
        self.scaler, self.native_amp = None, False  # the engine casts, and scales losses
        self._trained: list[Trained] = []
        self._replicas: list[Engine] = []
        """Of models that are prepared for evaluation only."""
        self.sharing = Sharing(self.config)
        self.sharing.require_own_reading(self.dispatch_batches)
        if self.sharing.on:  # by default, one rank reads a stream for all
            self.dataloader_config.dispatch_batches = False
        self._untrained: list[nn.Module] = []
        """Prepared without an optimizer, which may come in a later call."""

    # -- engines -----------------------------------------------------------------------------------

    def engine_of(self, model: nn.Module) -> Engine | None:
        """The engine of a prepared model; None if it has none."""
        engines = (*(trained.engine for trained in self._trained), *self._replicas)
        return next((engine for engine in engines if engine.module is model), None)

    @property
    def engine(self) -> Engine:
        """The engine of the one model that trains.

        Raises:
            ContractError: No model trains, or several do.
        """
        return self._one(self._trained).engine

    def _one(self, candidates: list[Trained]) -> Trained:
        if len(candidates) != 1:
            raise ContractError(
                f"{len(candidates)} prepared models could be meant, not one; prepare a model with its optimizer, and "
                "call backward once for each forward, of the sum of its losses"
            )
        return candidates[0]

    def _that_trains(self, loss: Tensor) -> Trained:
        """The model of a loss: the only one, the only one that ran, or the only one that the loss reaches."""
        candidates = self._trained if len(self._trained) == 1 else [trained for trained in self._trained if trained.ran]
        if len(candidates) > 1:
            candidates = [trained for trained in candidates if trained.engine.framework.reached_by(loss)]
        if len(candidates) > 1:
            names = " and ".join(type(trained.model).__name__ for trained in candidates)
            raise ContractError(
                f"the loss reaches the parameters of {len(candidates)} prepared models, {names}, and would leave "
                "gradients on each; run the forward and the backward of a loss that trains only one of them inside "
                "`with accelerator.engine_of(other).weights.frozen():` for each other one"
            )
        return self._one(candidates)

    def _train(self, optimizer: torch.optim.Optimizer, models: list[nn.Module]) -> Trained:
        optimized = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        owners = [model for model in models if not optimized.isdisjoint(model.parameters())]
        if len(owners) != 1:
            raise ContractError(
                f"{type(optimizer).__name__} has parameters of {len(owners)} models that were prepared without an "
                "optimizer, not of one; give each model one optimizer, and prepare both together"
            )
        trained = Trained(prepare(owners[0], self.config, optimizer, reseed=False), optimizer)
        self._trained.append(trained)
        self._untrained = [model for model in self._untrained if model is not owners[0]]
        return trained

    # -- prepare -----------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As Accelerate's; a model is sharded where its optimizer is prepared."""
        models = [argument for argument in args if isinstance(argument, nn.Module) and self.engine_of(argument) is None]
        self._untrained += [model for model in models if all(model is not other for other in self._untrained)]
        self.config = with_batch_size(self.config, args, self.num_processes if self.split_batches else 1)
        for argument in args:
            if isinstance(argument, torch.optim.Optimizer) and self._wrapped(argument) is None:
                self._train(argument, self._untrained)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """As Accelerate's; with `evaluation_mode`, the model gets an engine without gradients."""
        if self.engine_of(model) is None:
            if evaluation_mode and self._only_evaluates(model):
                self._replicas.append(prepare(model, self.config, train=False))
                self._replicas[-1].framework.routed()
            else:
                model.to(self.device)
                self._untrained += [] if any(model is other for other in self._untrained) else [model]
        if all(model is not other for other in self._models):
            self._models.append(model)
        return model

    def _only_evaluates(self, model: nn.Module) -> bool:
        return True

    def _wrapped(self, optimizer: torch.optim.Optimizer) -> EngineOptimizer | None:
        wrappers = (wrapper.optimizer for wrapper in self._trained)
        return next((wrapper for wrapper in wrappers if optimizer in (wrapper, wrapper.optimizer)), None)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> EngineOptimizer:
        """What steps the engine in place of an optimizer."""
        wrapped = self._wrapped(optimizer) or self._train(optimizer, self._untrained).optimizer
        if wrapped not in self._optimizers:
            self._optimizers.append(wrapped)
        return wrapped

    def prepare_scheduler(self, scheduler: LRScheduler) -> Any:
        """As Accelerate's, with a warning if it ends early."""
        follow(scheduler)
        prepared = super().prepare_scheduler(scheduler)
        return prepared if prepared is scheduler else watched(prepared, self.sharing)

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's; ranks that share samples read the same ones."""
        self.sharing.align(data_loader)
        with self.sharing.counting_groups():
            return super().prepare_data_loader(data_loader, *args, **kwargs)

    @property
    def num_processes(self) -> int:
        """As Accelerate's."""
        return self.sharing.number(self.state.num_processes)

    @property
    def process_index(self) -> int:
        """As Accelerate's."""
        return self.sharing.index(self.state.process_index)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As Accelerate's; of ranks that share samples, one counts."""
        if not self.sharing.on:
            return super().gather_for_metrics(input_data, use_gather_object)
        if use_gather_object or not _all_tensors(input_data):
            return super().gather_for_metrics(input_data if self.sharing.leads else [], use_gather_object=True)
        self._gathers_once = True
        try:
            return super().gather_for_metrics(input_data)
        finally:
            self._gathers_once = False

    def gather(self, tensor: Any) -> Any:
        """As Accelerate's, of every rank."""
        gathered = super().gather(tensor)
        return self.sharing.once(gathered) if self._gathers_once else gathered

    # -- the loop ----------------------------------------------------------------------------------

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Divide a loss by `gradient_accumulation_steps`, and run its backward on the engine."""
        backward_options.check(kwargs)
        self._that_trains(loss).backward(loss / self.gradient_accumulation_steps)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """A block whose micro-batches do not end their window."""
        matches = [trained for trained in self._trained if trained.model is model]
        with matches[0].inside_window() if matches else super().no_sync(model):
            yield

    @contextmanager
    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Refuse with several processes, since each takes part in the forwards of all others.

        Raises:
            ContractError: There are several processes.
        """
        if self.num_processes > 1:
            raise ContractError(
                "join_uneven_inputs is not supported: ranks of a sharded model make as many forwards; leave "
                "even_batches on, or set drop_last of the DataLoader"
            )
        yield

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """The norm of all gradients, the same on every engine; the step clips.

        Returns:
            None inside an accumulation window, where there is nothing to clip yet.

        Raises:
            ContractError: `norm_type` is not 2, or `parameters` are not those of a prepared model.
        """
        if norm_type != 2:
            raise ContractError(
                f"clip_grad_norm_ has norm_type={norm_type}, but engines clip by the L2 norm; leave it out"
            )
        clipped = [parameters] if isinstance(parameters, Tensor) else [*parameters]
        matches = [
            trained
            for trained in self._trained
            if len(self._trained) == 1 or {*trained.model.parameters()} & {*clipped}
        ]
        return self._one(matches).clip(clipped, max_norm, now=self._shows_gradients())

    def _shows_gradients(self) -> bool:  # between the clipping and the step
        return False

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Refuse, by ContractError: engines clip by the norm."""
        raise ContractError("clip_grad_value_ is not supported: engines clip by the norm; call clip_grad_norm_")

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Do nothing: the engine scales losses, and its norm is that of the gradients."""

    @contextmanager
    def autocast(self, autocast_handler: Any = None) -> Iterator[None]:
        """Do nothing: the engine casts inside the model, and a loss outside it is computed as it comes."""
        yield

    # -- the model ---------------------------------------------------------------------------------

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """The model, which `prepare` has not wrapped."""
        return (
            model
            if self.engine_of(model) is not None
            else super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)
        )

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """All weights on the main process, and an empty dict on the others. Collective."""
        engine = self.engine_of(model)
        return super().get_state_dict(model, unwrap) if engine is None else engine.weights.state_dict()

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """As Accelerate's, with a checkpoint of each trained model that any engine reads. Collective.

        Raises:
            ContractError: Between `backward` and `optimizer.step()`.
        """
        for trained in self._trained:
            trained.require_no_gradients("save_state")
        with self._without_engines():
            folder = super().save_state(output_dir, safe_serialization, **kwargs)
        self.wait_for_everyone()
        for index, trained in enumerate(self._trained):
            replace_checkpoint(trained.engine, Path(folder) / _FOLDER.format(index))
        return folder

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """As Accelerate's, on any engine and number of processes. Collective.

        Raises:
            CheckpointError: The folder is no checkpoint of this class.
        """
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            saved = Path(self.project_dir, "checkpoints").iterdir()
            input_dir = str(max(saved, key=lambda folder: int(folder.name.rpartition("_")[2])))
        folders = [Path(input_dir or "", _FOLDER.format(index)) for index in range(len(self._trained))]
        for folder in folders:
            if input_dir is not None and not folder.is_dir():
                raise CheckpointError(
                    f"{input_dir} has no {folder.name}, so it was not saved by unishard's Accelerator; to start from "
                    "only its weights, load them into the model before prepare"
                )
        for folder, trained in zip(folders, self._trained, strict=True):
            if folder.is_dir():
                trained.load(str(folder))
        with self._without_engines():  # after the engines, which restore a random state too
            super().load_state(input_dir, load_kwargs, **kwargs)

    @contextmanager
    def _without_engines(self) -> Iterator[None]:
        """A block in which Accelerate knows only of what no engine has."""
        models, optimizers = self._models, self._optimizers
        self._models = [model for model in models if self.engine_of(model) is None]
        self._optimizers = []
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers

    # -- the end -----------------------------------------------------------------------------------

    def free_memory(self, *objects: Any) -> Any:
        """As Accelerate's: forget what was prepared, and close its engines."""
        self.close()
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """As Accelerate's, and close the engines."""
        self.close()
        super().end_training()

    def close(self) -> None:
        """Close the engines; the models cannot be used afterwards."""
        for trained in self._trained:
            trained.close()
        for engine in self._replicas:
            engine.close()
        self._trained, self._replicas, self._untrained = [], [], []


def _all_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _changes_training(handler: Any) -> bool:
    """Whether a handler asks for another training, as one of DDP does that compresses gradients and not one that names
    unused parameters, which the Trainer always passes.
    """
    ddp = isinstance(handler, accelerate.DistributedDataParallelKwargs)
    return handler is not None and not (ddp and DDPCommunicationHookType(handler.comm_hook) is _NO_HOOK)
