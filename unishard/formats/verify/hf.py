"""What transformers makes of TrainingArguments, in a file of its own or of LLaMA-Factory or TRL, which hand theirs on
to it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from unishard.formats import catalog
from unishard.formats.hf.keys import RENAMED
from unishard.formats.verify.deepspeed import settings_of as deepspeed_settings
from unishard.formats.verify.settings import AUTO, clipping

_SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "polynomial": "linear",
    "inverse_sqrt": "inverse_sqrt",
    "warmup_stable_decay": "wsd",
}
_WHOLE = {
    "output_dir",
    "learning_rate",
    "per_device_train_batch_size",
    "num_train_epochs",
    "max_steps",
    "bf16",
    "fp16",
    "optim",
}
"""A file without any of these holds a part of the arguments; the others are in the script."""
_ENGINES = {"fsdp", "deepspeed"}
_OF_THE_MACHINE = {"use_cpu": True, "tf32": None}
"""What transformers takes only with a GPU, which says nothing about a config."""
_WITHOUT_GPU = {"sync_module_states": False, "cpu_ram_efficient_loading": False}
"""The first needs a GPU, and the second the first."""
_NAMES = {"adamw": "adamw", "sgd": "sgd", "adagrad": "adagrad", "lion": "lion"}


def settings_of(document: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
    """The settings with which the Trainer would train.

    Raises what transformers raises; keys that are no arguments are left out.
    """
    from transformers import TrainingArguments

    known = {field.name for field in fields(TrainingArguments)}
    with TemporaryDirectory() as place, _fresh(folder):
        arguments = {key: value for key, value in document.items() if key in known}
        built = TrainingArguments(**{**arguments, **_OF_THE_MACHINE, "output_dir": place, "report_to": "none"})
        settings = _settings(built)
        if arguments.keys() & _WHOLE:
            return settings
        return (
            {field: value for field, value in settings.items() if field.startswith(("sharding.", "offload."))}
            if arguments.keys() & _ENGINES
            else {}
        )


def _window(built: Any) -> Any:
    """Micro-batches of an update, which `accelerator_config` may say in place of the argument."""
    told = built.accelerator_config.gradient_accumulation_kwargs or {}
    return told.get("num_steps", built.gradient_accumulation_steps)


def _settings(built: Any) -> dict[str, Any]:
    named = str(getattr(built.optim, "value", built.optim)).removeprefix("paged_")
    optim = named.partition("_")[0]
    settings: dict[str, Any] = {
        "precision.compute": "bf16" if built.bf16 else "fp16" if built.fp16 else "fp32",
        "training.micro_batch_size": built.per_device_train_batch_size,
        "training.gradient_accumulation_steps": _window(built),
        "training.gradient_clipping": clipping(built.max_grad_norm),
        "training.seed": built.seed,
        "optimizer.name": "adamw_8bit" if optim == "adamw" and named.endswith("8bit") else _NAMES.get(optim, optim),
        "optimizer.lr": built.learning_rate,
        "optimizer.weight_decay": built.weight_decay,
        "scheduler.name": _SCHEDULES.get(
            str(getattr(built.lr_scheduler_type, "value", built.lr_scheduler_type)), "another"
        ),
    }
    if optim in ("adamw", "lion"):
        settings["optimizer.betas"] = (built.adam_beta1, built.adam_beta2)
    if built.max_steps > 0:
        settings["scheduler.total_steps"] = built.max_steps
        settings["scheduler.warmup_steps"] = built.get_warmup_steps(built.max_steps)
    engine = getattr(built, "hf_deepspeed_config", None)
    if engine is not None:
        own = dict(deepspeed_settings(engine.config, 1))
        return settings | {field: value for field, value in own.items() if value != AUTO}
    return settings | (_fsdp(built.fsdp_plugin_args) if built.fsdp_plugin_args else {"sharding.strategy": "no_shard"})


def _fsdp(arguments: Mapping[str, Any]) -> dict[str, Any]:
    from accelerate.utils import FullyShardedDataParallelPlugin

    from unishard.formats.verify.accelerate import fsdp_settings

    return fsdp_settings(FullyShardedDataParallelPlugin(**{**arguments, **_WITHOUT_GPU}))


@contextmanager
def _fresh(folder: Path | None) -> Iterator[None]:
    """Transformers and Accelerate keep what they were told last, some of it in the environment; a config that is named
    lies here.
    """
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    before, directory = dict(os.environ), Path.cwd()
    os.chdir(folder or directory)
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(before)


_DECIDES: Mapping[str, tuple[str, ...]] = {
    "learning_rate": ("optimizer.lr",),
    "weight_decay": ("optimizer.weight_decay",),
    "adam_beta2": ("optimizer.betas",),
    "lr_scheduler_type": ("scheduler.name", "scheduler.total_steps", "scheduler.warmup_steps"),
    "per_device_train_batch_size": ("training.micro_batch_size",),
    "gradient_accumulation_steps": ("training.gradient_accumulation_steps",),
    "bf16": ("precision.compute",),
}
"""What is known only where the file has the argument, if the tool around transformers has a default of its own."""
_RATIO = "warmup_ratio"


def settings_around(document: Mapping[str, Any], folder: Path | None, tool: str) -> dict[str, Any]:
    """The settings with which the tool's trainer would train, without those that the tool itself assumes.

    Raises what transformers raises.

    Args:
        document: The file.
        folder: Where it lies.
        tool: The name of its format.
    """
    settings = settings_of(_arguments(document), folder)
    assumed = catalog.get(tool).silent(document).keys() - document.keys()  # type: ignore[attr-defined]
    unknown = {field for key in assumed for field in _DECIDES.get(key, ())}
    if "torch_dtype" in document and not {"bf16", "fp16"} & document.keys():
        unknown.add("precision.compute")
    return {field: value for field, value in settings.items() if field not in unknown}


def _arguments(document: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments under the names of transformers 5: these tools also run with versions that have the older ones."""
    arguments = {RENAMED.get(key, key): value for key, value in document.items() if key != _RATIO}
    if document.get(_RATIO) and not arguments.get("warmup_steps"):
        arguments["warmup_steps"] = document[_RATIO]
    return arguments
