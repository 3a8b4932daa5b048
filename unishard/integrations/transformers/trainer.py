"""transformers' Trainer on either engine: a mixin for it, and for every trainer that is made from it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import accelerate
import torch
import transformers
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback
from transformers.trainer import OPTIMIZER_NAME, OPTIMIZER_NAME_BIN, SCHEDULER_NAME

from unishard.config import Config
from unishard.distributed.slices import slice_of
from unishard.engine.engine import Engine
from unishard.engine.optim.optimizers import factory
from unishard.engine.optim.schedule import factor
from unishard.errors import CheckpointError, ConfigError, Problem
from unishard.integrations.accelerate.accelerator import Accelerator
from unishard.integrations.accelerate.trained import Trained
from unishard.integrations.saving import replace_checkpoint
from unishard.integrations.transformers.arguments import agree_on_schedule, config_for, section_of_deepspeed, without
from unishard.integrations.transformers.checkpoints import converted, is_sharded
from unishard.integrations.transformers.replaced_heads import finish_whole, read_by_forward
from unishard.logits.forward import whole_logits

__all__ = ["UnishardMixin", "UnishardTrainer"]

_FOLDER = "unishard"
"""Where the engine's state is, inside a checkpoint of the Trainer."""
_GENERATES = ("num_generations", "generation_config")
"""What trainers have that train on completions of their own model."""
_FULL_EVAL = ("fp16_full_eval", "bf16_full_eval")

_LOSS_ONLY = 2
"""The place of `prediction_loss_only` among the arguments of `prediction_step`."""

_logger = logging.getLogger("unishard")

if TYPE_CHECKING:  # what it is mixed into
    from transformers import Trainer as _Trainer
else:
    _Trainer = object


class UnishardMixin(_Trainer):  # type: ignore[misc]
    """Puts a trainer on unishard's engines: `class OnUnishard(UnishardMixin, SFTTrainer)`."""

    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self, *args: Any, unishard: Config | str | Path | Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Make the trainer.

        Args:
            args: Of the trainer.
            unishard: A config, a file or a mapping; None: the `unishard` of its TrainingArguments, what their `fsdp`
                or `deepspeed` say, or what `unishard.integrations.accelerate.Accelerator` finds.
            kwargs: Of the trainer.

        Raises:
            ConfigError: There is no config, it cannot be used, or TrainingArguments contradict it.
        """
        self._unishard = unishard
        super().__init__(*args, **kwargs)
        self._refuse_own_samples()

    def _refuse_own_samples(self) -> None:
        """Raise ConfigError if ranks that share samples would each make their own."""
        sharing = self.accelerator.sharing
        if sharing.on and any(hasattr(self, name) for name in _GENERATES):
            what = (
                f"is {sharing.size}, but {type(self).__name__} trains on what each rank generates, "
                "which ranks cannot share; set it to 1"
            )
            raise ConfigError([Problem(sharing.field, what)])

    def create_accelerator_and_postprocess(self) -> None:
        """Make the Trainer's accelerator, and put it on the engines."""
        self._config = config = config_for(self.args, self._unishard, self.model)
        for other in _open:
            other.give_up(self.model)
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = _TrainersAccelerator
        self.accelerator.trainer = self
        self.accelerator._begin(config)
        # The trainer has bound the one of the class before.
        objects = getattr(self.args, "eval_use_gather_object", False)
        self.gather_function = partial(self.accelerator.gather_for_metrics, use_gather_object=objects)

    # -- the loop ----------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's, with the weights that a replaced forward reads."""
        with self._reading():
            return super().training_step(*args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's, with the weights that a replaced forward reads, and with logits where it returns them."""
        loss_only = kwargs.get("prediction_loss_only", args[2] if len(args) > _LOSS_ONLY else False)
        with torch.no_grad(), self._reading(), nullcontext() if loss_only else whole_logits():
            return super().prediction_step(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's; a model that trains on an engine is not cast, and computes in its config's precision."""
        full = [name for name in _FULL_EVAL if getattr(self.args, name)]
        casts = bool(full) and not self.is_in_train and self.accelerator.engine_of(self.model) is not None
        if casts:
            compute = self.accelerator.config.precision.compute
            _logger.warning("TrainingArguments.%s: not applied; the engine evaluates in %s", full[0], compute)
        try:
            if self.accelerator.sharing.on and self.gather_function == self.accelerator.gather:  # where it generates
                self.gather_function = self.accelerator.gather_of_groups
            for name in full if casts else ():
                setattr(self.args, name, False)
            return super().evaluation_loop(*args, **kwargs)
        finally:
            for name in full:
                setattr(self.args, name, True)

    def get_tp_size(self) -> int:
        """How many ranks have the same batch, which the trainer counts as one."""
        return self.accelerator.sharing.size * super().get_tp_size()  # type: ignore[no-any-return]

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        items = super()._get_num_items_in_batch(*args, **kwargs)
        # The trainer divides by the ranks that have the same batch, also where it has not added theirs up.
        added = self.args.average_tokens_across_devices and self.args.world_size > 1
        return items if items is None or added else items * self.accelerator.sharing.size

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        return False  # under `parallel` they are on several, and the engine clips them all the same

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """A block in which models whose forward was replaced, as TRL does, may read the weights of their head."""
        with ExitStack() as stack:
            for engine, names in self.accelerator.heads():
                stack.enter_context(engine.weights.unsharded(names))
            yield

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's, while the model is whole."""
        made = [("optimizer", self.optimizer), ("scheduler", self.lr_scheduler)]
        self.accelerator.config = without(self.accelerator.config, [name for name, given in made if given is None])
        if self.accelerator.engine_of(self.model) is None and hasattr(self.model, "num_parameters"):
            self._size = self.model.num_parameters(exclude_embeddings=True)
        if self.optimizer is None and (section := section_of_deepspeed(self.args, "optimizer")) is not None:
            trained = [
                (name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad
            ]
            self.optimizer = factory(section, self.model)(trained)
        return super().create_optimizer(*args, **kwargs)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """As the trainer's, or the one in a config of DeepSpeed."""
        section = section_of_deepspeed(self.args, "scheduler", num_training_steps)
        if self.lr_scheduler is None:
            agree_on_schedule(self._config, self.args, num_training_steps)
        if self.lr_scheduler is None and section is not None:
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, lambda updates: factor(section, updates))
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """As the trainer's, by the size of the whole model."""
        name = getattr(self.model, "main_input_name", "input_ids")
        known = name in inputs and hasattr(self, "_size")
        return 6 * inputs[name].numel() * self._size // self.accelerator.sharing.size if known else 0

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        counted = self.state.num_input_tokens_seen - before  # on each rank
        self.state.num_input_tokens_seen = before + counted // self.accelerator.sharing.size

    def add_callback(self, callback: Any) -> None:
        """As the trainer's; the one of TRL that moves a reference model towards the policy does so on the engines."""
        if hasattr(callback, "sync_target_model"):
            callback.sync_target_model = self._sync
        super().add_callback(callback)

    def _sync(self, model: nn.Module, target: nn.Module, alpha: float) -> None:
        policy, reference = self.accelerator.engine_of(model), self.accelerator.engine_of(target)
        for name, _ in target.named_parameters():
            with reference.weights.gathered([name]) as full:
                full[name].lerp_(policy.weights.read(name), alpha)

    # -- checkpoints -------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the trainer's, with all weights. Collective."""
        engine = self.accelerator.engine_of(self.model)
        if engine is None:
            super().save_model(output_dir, _internal_call)
            return
        state = engine.weights.state_dict(all_ranks=self.args.save_on_each_node)
        if self.args.should_save:
            self._save(output_dir or self.args.output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.accelerator.save(Path(output_dir) / _FOLDER)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        if is_sharded(folder):
            return  # the engine loads it, once there is one
        if (folder / _FOLDER).is_dir() and type(self.model).load_state_dict is nn.Module.load_state_dict:
            return
        if (folder / OPTIMIZER_NAME_BIN).exists():
            raise CheckpointError(
                f"{folder}: FSDP has saved {OPTIMIZER_NAME_BIN} with FULL_STATE_DICT, which cannot be read into an "
                "engine; finish the run without unishard, save it with SHARDED_STATE_DICT, or remove the file to start "
                "from the weights only"
            )
        engine = self.accelerator.engine_of(self.model)
        if engine is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            engine.weights.load(folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder, scheduler = Path(checkpoint), Path(checkpoint, SCHEDULER_NAME)
        if (folder / _FOLDER).is_dir():
            self.accelerator.load(folder / _FOLDER)
        elif (folder / OPTIMIZER_NAME).exists() or is_sharded(folder):
            engine, groups = self.accelerator.engine, self.accelerator.groups
            with converted(folder, engine, groups, Path(self.args.output_dir)) as made:
                self.accelerator.load(made)
        else:
            return
        if not scheduler.exists():
            raise CheckpointError(
                f"{folder} has no {SCHEDULER_NAME}, as where DeepSpeed has stepped its own schedule: it would begin "
                "anew; finish the run without unishard, or load only the weights into the model, without "
                "resume_from_checkpoint"
            )
        self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))
        rates = self.lr_scheduler.get_last_lr()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        if (best / _FOLDER).is_dir():
            self.accelerator.load(best / _FOLDER)
        else:
            self.accelerator.engine.weights.load(best)


class UnishardTrainer(UnishardMixin, transformers.Trainer):  # type: ignore[misc]
    """transformers' Trainer on unishard's engines."""


class _TrainersAccelerator(Accelerator):
    """Keeps the engines from one training of a Trainer to the next, and lets it evaluate its model before."""

    trainer: Any

    def _begin(self, config: Config) -> None:
        super()._begin(config)
        self._heads: dict[Engine, list[str]] = {}
        self.groups: list[list[str]] = []
        """Names of the parameters in each group of the optimizer."""
        _open.add(self)

    def _train(self, optimizer: torch.optim.Optimizer, models: list[nn.Module]) -> Trained:
        names = {parameter: name for model in models for name, parameter in model.named_parameters()}
        self.groups = [[names.get(parameter, "") for parameter in group["params"]] for group in optimizer.param_groups]
        trained = super()._train(optimizer, models)
        trained.engine.framework.finish_whole(finish_whole)
        return trained

    def prepare_model(self, *args: Any, **kwargs: Any) -> nn.Module:
        """As Accelerate's; outputs of a replaced forward are those of whole samples."""
        model = super().prepare_model(*args, **kwargs)
        for engine in self._replicas:
            engine.framework.finish_whole(finish_whole)
        return model

    def heads(self) -> Iterator[tuple[Engine, list[str]]]:
        """The engines whose model has a forward of its own in place of its class's, and the weights of its head."""
        for engine in (*(trained.engine for trained in self._trained), *self._replicas):
            if engine not in self._heads:
                self._heads[engine] = read_by_forward(engine.module)
            if self._heads[engine]:
                _require_whole(engine, self._heads[engine])
                yield engine, self._heads[engine]

    def gather_of_groups(self, tensor: Any) -> Any:
        """As `gather`; of ranks that share samples, one counts."""
        return self.sharing.once(self.gather(tensor))

    def load(self, folder: Path) -> None:
        """Continue the model that trains from a checkpoint."""
        self._one(self._trained).load(str(folder))

    def save(self, folder: Path) -> None:
        """Save the model that trains in a folder of its own."""
        replace_checkpoint(self.engine, folder)

    def give_up(self, model: nn.Module | None) -> None:
        """Make a model plain again, for another Trainer that gets it."""
        for trained in [trained for trained in self._trained if trained.model is model]:
            self._trained.remove(trained)
            trained.release()
        for engine in [engine for engine in self._replicas if engine.module is model]:
            self._replicas.remove(engine)
            engine.framework.release()

    def _only_evaluates(self, model: nn.Module) -> bool:
        return model is not self.trainer.model

    def _shows_gradients(self) -> bool:
        name = TrainerCallback.on_pre_optimizer_step.__name__
        callbacks = self.trainer.callback_handler.callbacks
        return any(getattr(type(callback), name) is not getattr(TrainerCallback, name) for callback in callbacks)

    def free_memory(self, *objects: Any) -> Any:
        """As Accelerate's, but the engine of the Trainer's model stays."""
        for trained in self._trained:
            if trained.model is self.trainer.model:
                trained.drop()
            else:
                trained.close()
        self._trained = [trained for trained in self._trained if trained.model is self.trainer.model]
        return accelerate.Accelerator.free_memory(self, *objects)


_open: WeakSet[_TrainersAccelerator] = WeakSet()
"""Of the Trainers of this process."""


def _require_whole(engine: Engine, names: list[str]) -> None:
    """Check that a rank has all of the weights of a head that a replaced forward reads.

    Raises:
        ConfigError: It has a part.
    """
    for name in names:
        part = slice_of(engine.module.get_parameter(name))
        if part is not None:
            what = (
                f"is {part.of}, but the forward that the trainer has put in place of {type(engine.module).__name__}'s "
                f"reads {name} itself, of which each rank has a part; set it to 1, or write a "
                "parallel.tensor.plan that leaves it out"
            )
            raise ConfigError([Problem("parallel.tensor.size", what)])
