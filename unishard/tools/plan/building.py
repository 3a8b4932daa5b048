"""Build a model without data, for its shape and its activations. Imports torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unishard.config import Config
from unishard.config.topology import Topology
from unishard.contract import registry
from unishard.contract.model_shape import ModelShape
from unishard.contract.plan import EngineSpec
from unishard.contract.translate import translate
from unishard.engine.model.quantization.loading import quantize
from unishard.engine.model.quantization.requirements import require_installed
from unishard.engine.model.shape import shape_of
from unishard.engine.model.units import units_of
from unishard.errors import ModelError
from unishard.parallel.sliced_model import SlicedModel
from unishard.tools.plan.activations import Activations
from unishard.tools.plan.counting import Noted, counting_groups
from unishard.tools.plan.refusals import refusal
from unishard.tools.plan.tracing import trace
from unishard.tools.plan.without_data import without_data

Batch = Callable[[int, int], Mapping[str, Any]]
"""Makes the keyword arguments of a model's forward from a micro-batch size and a sequence length."""


Loss = Callable[[Any], Tensor]
"""Computes the mean loss of a micro-batch from what forward returns."""


class ModelWithBatch(NamedTuple):
    """A model, and how it is run."""

    model: nn.Module
    batch: Batch | None
    """What makes its inputs; None if that is not known."""
    loss: Loss


class BuiltModel:
    """Builds a model, each time anew, since a trace changes it."""

    def __init__(self, name: str, folder: Path | None) -> None:
        """Hold the name.

        Args:
            name: As on the command line.
            folder: That with `config.json`; None for a factory.
        """
        self._name, self._folder = name, folder

    def build(self) -> ModelWithBatch:
        """The model, and how it is run.

        Raises:
            ConfigError: It cannot be built.
        """
        return self._from_factory() if self._folder is None else self._from_folder(self._folder)

    def _changed(self, cfg: Config, noted: list[Noted]) -> ModelWithBatch:
        """The model as it is before it is sharded: quantized, and the part that a rank has of it.

        A quantized one of a folder has no adapters. It is then frozen, and gradients reach its inputs, as they reach
        adapters in each of its layers.

        Args:
            cfg: The config.
            noted: Gets what the model exchanges with other ranks.
        """
        built = self.build()
        model: Any = built.model
        if cfg.quantization.on:
            require_installed(cfg.quantization.type)
            quantize(model, cfg.quantization, device="cpu")
        if cfg.quantization.on and self._folder is not None:
            model.requires_grad_(False)
            model.enable_input_require_grads()
        SlicedModel(model, cfg.parallel, partial(counting_groups, noted))
        return built

    def shape(self, cfg: Config) -> ModelShape:
        """The shape of the model.

        Raises:
            ConfigError: It cannot be built.
            ModelError: A class in the section `sharding` is not in it.
        """
        with without_data():
            model = self._changed(cfg, []).model
        return shape_of(model, cfg.sharding)

    def engine(self, cfg: Config, backend: str, topology: Topology) -> EngineSpec:
        """What an engine is built from.

        Raises:
            ConfigError: The model cannot be built, or the config does not fit the ranks.
            ModelError: A class in the section `sharding` is not in it.
        """
        with without_data():
            model = self._changed(cfg, []).model
        translation = translate(cfg, backend=backend, topology=topology).check(strict=cfg.strict)
        shape, units = shape_of(model, cfg.sharding), units_of(model, cfg.sharding)
        return registry.get(backend).spec(cfg, translation, topology, shape, units)

    def activations(self, cfg: Config, micro_batch_size: int, seq_len: int) -> Activations:
        """Run one micro-batch.

        Raises:
            ConfigError: The model cannot be built.
            ModelError: Its inputs are not known, or it reads data.
        """
        noted: list[Noted] = []
        with without_data() as fake:
            model, batch, loss = self._changed(cfg, noted)
        if batch is None:
            raise ModelError(
                f"--model {self._name}: its inputs are not known; let the factory return (model, batch), where "
                "batch(micro_batch_size, seq_len) returns the keyword arguments of forward, or give --no-activations"
            )
        try:
            return trace(
                model, cfg, batch, loss, micro_batch_size=micro_batch_size, seq_len=seq_len, fake=fake, noted=noted
            )
        except ModelError:
            raise
        except Exception as error:  # whatever the model's own code raises
            first = f": {str(error).splitlines()[0]}" if str(error) else ""
            problem = (
                f"--model {self._name}: cannot be run without data ({type(error).__name__}{first}); give "
                "--no-activations"
            )
            raise ModelError(problem) from error

    def _from_folder(self, folder: Path) -> ModelWithBatch:
        try:
            import transformers
        except ModuleNotFoundError as error:
            raise refusal(f"a folder needs {error.name}, which is not installed; pip install 'unishard[hf]'") from error
        try:
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
            if hasattr(config, "use_cache"):
                config.use_cache = False
            names = [name for name in getattr(config, "architectures", None) or () if hasattr(transformers, name)]
            if names:
                model = getattr(transformers, names[0])._from_config(config, dtype=torch.float32)
            else:
                model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        except Exception as error:  # transformers can raise anything for an unsuitable file
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise refusal(f"{folder} cannot be read by transformers ({reason})") from error
        return ModelWithBatch(model, _batch_of(model), self._own_loss)

    def _from_factory(self) -> ModelWithBatch:
        module, _, function = self._name.partition(":")
        try:
            factory = getattr(importlib.import_module(module), function, None)
        except ImportError as error:
            raise refusal(
                f"{self._name}: importing {module} fails ({error}); run this where it can be imported"
            ) from error
        if not callable(factory):
            raise refusal(
                f"{self._name}: {module} has no function {function!r}; write module:factory, such as train:build_model"
            )
        made = factory()
        model, batch, loss, *_ = (*(made if isinstance(made, tuple) and 2 <= len(made) <= 3 else (made,)), None, None)
        if not isinstance(model, nn.Module):
            raise refusal(
                f"{self._name} returned {type(model).__name__}; it must return a torch.nn.Module, or (model, batch)"
            )
        return ModelWithBatch(model, batch or _batch_of(model), loss or self._own_loss)

    def _own_loss(self, out: Any) -> Tensor:
        """The loss that forward returns.

        Raises:
            ModelError: It returns none.
        """
        loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", out)
        if isinstance(loss, Tensor) and loss.numel() == 1:
            return loss
        returned = (
            f"a tensor of shape {list(loss.shape)}"
            if isinstance(loss, Tensor)
            else f"{type(out).__name__} without a loss"
        )
        raise ModelError(
            f"--model {self._name}: its forward returns {returned}; let a factory return (model, batch, loss), where "
            "loss(output) returns the mean loss of what forward returns"
        )


def _batch_of(model: Any) -> Batch | None:
    """Tokens and labels for a language model of transformers."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_output_embeddings") or model.get_output_embeddings() is None:
        return None
    return _tokens


def _tokens(micro_batch_size: int, seq_len: int) -> Mapping[str, Any]:
    return {name: torch.zeros(micro_batch_size, seq_len, dtype=torch.int64) for name in ("input_ids", "labels")}
