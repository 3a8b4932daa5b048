"""transformers' Trainer on either engine: a mixin for it, and for every trainer that is made from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import accelerate
import torch
import transformers
from torch import nn
from transformers.trainer import OPTIMIZER_NAME, OPTIMIZER_NAME_BIN, SCHEDULER_NAME

from unishard.config import Config
from unishard.engine.engine import Engine
from unishard.errors import CheckpointError, ConfigError, Problem
from unishard.integrations.accelerate.accelerator import Accelerator
from unishard.integrations.accelerate.configuring import agreed, config_of, translated

__all__ = ["UnishardMixin", "UnishardTrainer"]

_FOLDER = "unishard"
"""Where the engine's state is, inside a checkpoint of the Trainer."""
_ENGINE = ("backend", "sharding", "precision", "offload", "activation_checkpointing", "communication", "native")
"""What `fsdp` of TrainingArguments says; their other arguments are the Trainer's."""

if TYPE_CHECKING:  # what it is mixed into
    from transformers import Trainer as _Trainer
else:
    _Trainer = object


class UnishardMixin(_Trainer):  # type: ignore[misc]
    """Puts a trainer on unishard's engines: `class OnUnishard(UnishardMixin, SFTTrainer)`."""

    def __init__(
        self, *args: Any, unishard: Config | str | Path | Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Make the trainer.

        Args:
            args: Of the trainer.
            unishard: A config, a file or a mapping; None: the `unishard` of its TrainingArguments, what their `fsdp`
                says, or what `unishard.integrations.accelerate.Accelerator` finds.
            kwargs: Of the trainer.

        Raises:
            ConfigError: There is no config, it cannot be used, or TrainingArguments contradict it.
        """
        self._unishard = unishard
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the Trainer's accelerator, and put it on the engines."""
        config = self._config()
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = _TrainersAccelerator
        self.accelerator.trainer = self
        self.accelerator._begin(config)

    def _config(self) -> Config:
        args, source = self.args, self._unishard
        source = getattr(args, "unishard", None) if source is None else source
        if getattr(args, "deepspeed_plugin", None) is not None:
            raise _wrong(
                "deepspeed",
                "makes transformers build DeepSpeed; remove it, and pass unishard='train.yaml', which `unishard "
                "translate ds_config.json --to unishard -o train.yaml` writes",
            )
        for name in ("fp16_full_eval", "bf16_full_eval"):
            if getattr(args, name):
                raise _wrong(name, "would cast a sharded model; remove it, and set precision in unishard's config")
        if not args.fsdp:
            config = config_of(source)
        elif source is not None:
            raise _wrong("fsdp", "is set beside a config of unishard; remove it")
        else:
            said = {name: getattr(args, name) for name in ("fsdp", "fsdp_config", "bf16", "fp16")}
            config = translated(said, "hf", sections=_ENGINE)
            args.fsdp_plugin_args = None  # otherwise Accelerate would build FSDP
        return agreed(
            config,
            {
                "precision.compute": "bf16" if args.bf16 else "fp16" if args.fp16 else None,
                "training.gradient_accumulation_steps": args.gradient_accumulation_steps,
                "training.gradient_clipping": args.max_grad_norm or None,
            },
        )

    # -- the loop ----------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's, with the weights that a replaced forward reads."""
        with self._reading():
            return super().training_step(*args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's, with the weights that a replaced forward reads."""
        with torch.no_grad(), self._reading():
            return super().prediction_step(*args, **kwargs)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """A block in which models whose forward was replaced, as TRL does, may read the weights of their head."""
        with ExitStack() as stack:
            for engine, names in self.accelerator.heads():
                stack.enter_context(engine.unsharded(names))
            yield

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's, while the model is whole."""
        if self.accelerator.engine_of(self.model) is None and hasattr(self.model, "num_parameters"):
            self._size = self.model.num_parameters(exclude_embeddings=True)
        return super().create_optimizer(*args, **kwargs)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """As the trainer's, by the size of the whole model."""
        name = getattr(self.model, "main_input_name", "input_ids")
        return 6 * inputs[name].numel() * self._size if name in inputs and hasattr(self, "_size") else 0

    # -- checkpoints -------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the trainer's, with all weights. Collective."""
        engine = self.accelerator.engine_of(self.model)
        if engine is None:
            super().save_model(output_dir, _internal_call)
            return
        state = engine.state_dict(all_ranks=self.args.save_on_each_node)
        if self.args.should_save:
            self._save(output_dir or self.args.output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.accelerator.engine.save(Path(output_dir) / _FOLDER)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        if (folder / _FOLDER).is_dir():
            return  # the engine loads it, once there is one
        if native := [name for name in (OPTIMIZER_NAME, OPTIMIZER_NAME_BIN) if (folder / name).exists()]:
            raise CheckpointError(
                f"{folder} was saved without unishard, and its {native[0]} cannot be read into an engine: to resume "
                "would lose the state of the optimizer; remove the file to start from the weights alone, or finish "
                "the run without unishard"
            )
        engine = self.accelerator.engine_of(self.model)
        if engine is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            engine.load_weights(folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (folder := Path(checkpoint, _FOLDER)).is_dir():
            return
        self.accelerator.load(folder)
        state = torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True)
        self.lr_scheduler.load_state_dict(state)

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        if (best / _FOLDER).is_dir():
            self.accelerator.load(best / _FOLDER)
        else:
            self.accelerator.engine.load_weights(best)


class UnishardTrainer(UnishardMixin, transformers.Trainer):  # type: ignore[misc]
    """transformers' Trainer on unishard's engines."""


class _TrainersAccelerator(Accelerator):
    """Keeps the engines from one training of a Trainer to the next, and lets it evaluate its model before."""

    trainer: Any

    def _begin(self, config: Config) -> None:
        super()._begin(config)
        self._heads: dict[Engine, list[str]] = {}

    def heads(self) -> Iterator[tuple[Engine, list[str]]]:
        """The engines whose model has a forward of its own in place of its class's, and the weights of its head."""
        for engine in (*(each.engine for each in self._trained), *self._replicas):
            if engine not in self._heads:
                self._heads[engine] = _read_by_forward(engine.module)
            if self._heads[engine]:
                yield engine, self._heads[engine]

    def load(self, folder: Path) -> None:
        """Continue the model that trains from a checkpoint."""
        self._one(self._trained).load(str(folder))

    def _only_evaluates(self, model: nn.Module) -> bool:
        return model is not self.trainer.model

    def free_memory(self, *objects: Any) -> Any:
        """As Accelerate's, but the engine of the Trainer's model stays."""
        for each in self._trained:
            if each.model is self.trainer.model:
                each.drop()
            else:
                each.close()
        self._trained = [each for each in self._trained if each.model is self.trainer.model]
        return accelerate.Accelerator.free_memory(self, *objects)


def _read_by_forward(model: nn.Module) -> list[str]:
    """Names of the weights of heads that a replaced forward may read outside their module."""
    owners: list[Any] = [
        each for each in model.modules() if "forward" in vars(each) and hasattr(each, "get_output_embeddings")
    ]
    heads = [head for each in owners if (head := each.get_output_embeddings()) is not None]
    held = {parameter for head in heads for parameter in head.parameters()}
    return [name for name, parameter in model.named_parameters() if parameter in held]


def _wrong(argument: str, what: str) -> ConfigError:
    return ConfigError([Problem(f"TrainingArguments.{argument}", what)])
