"""What a launch script, a file of TrainingArguments or the words of a command line say beside a config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from unishard.config.topology import Topology
from unishard.contract.entries import Entry
from unishard.errors import ConfigError, Problem
from unishard.formats import catalog
from unishard.formats.dropping import DroppedKey, drop_keys
from unishard.formats.following import Named, opened
from unishard.formats.launching import Launch
from unishard.formats.names import names
from unishard.formats.source import Source

__all__ = ["TRAINER", "Supplied", "of_config", "trainer", "whose"]

TRAINER = ("hf", "trl", "llamafactory", "swift")
"""Formats whose arguments are those of TrainingArguments."""
_SURE = "per_device_train_batch_size"
_ONLY_TRAINER = names(
    "bf16 fp16 tf32 save_steps save_strategy save_total_limit logging_steps logging_strategy eval_strategy "
    "evaluation_strategy warmup_ratio warmup_steps report_to do_train overwrite_output_dir remove_unused_columns "
    "ddp_timeout lr_scheduler_type optim dataloader_num_workers max_grad_norm adam_beta1 gradient_checkpointing "
    "num_train_epochs"
)
_LEAST = 2
_NEVER_TRAINER = names(
    "num_warmup_steps max_train_steps lr_warmup_steps zero_stage deepspeed_config lr_scheduler checkpointing_steps "
    "with_tracking mixed_precision train_micro_batch_size_per_gpu"
)
"""Arguments of scripts with a loop of their own."""


def trainer() -> Any:
    """The format of TrainingArguments, with what it says of arguments that are not the whole of them."""
    return catalog.get(TRAINER[0])


class Supplied(NamedTuple):
    """Arguments, and how the processes are started."""

    name: str
    """Where they stand."""
    values: Mapping[str, Any]
    places: Mapping[str, str]
    """Where each argument stands, where that is known more closely."""
    format: str
    """Whose arguments they are, with its defaults; empty where that is not known."""
    topology: Topology | None = None
    launch: Launch = Launch()
    started: tuple[Entry, ...] = ()
    """What a launch line says about hosts and processes."""
    launcher: Source | None = None
    """The config of Accelerate from which the training is started."""
    missing: tuple[Entry, ...] = ()
    """Files that a launch line names and that cannot be read."""
    recipe: Named | None = None
    """The file of arguments that a launch line hands to its script."""

    def without(self, patterns: Iterable[str]) -> tuple[Supplied, list[DroppedKey]]:
        """The same without the arguments that match, and those."""
        found = {key: pattern for key in self.values for pattern in patterns if fnmatchcase(key, pattern)}
        dropped = [DroppedKey(key, self.values[key], None, pattern) for key, pattern in found.items()]
        launcher, further = drop_keys(self.launcher, tuple(patterns)) if self.launcher else (None, [])
        values = {key: value for key, value in self.values.items() if key not in found}
        return self._replace(values=values, launcher=launcher), [*dropped, *further]

    def with_recipe(self) -> Supplied:
        """The same with the arguments of the recipe, which yield to those of the line."""
        file = opened(self.recipe, self.name) if self.recipe else None
        if not isinstance(file, Source):
            return self._replace(missing=(*self.missing, file)) if file else self
        try:
            recipe = of_config(file)
        except ConfigError:
            return self  # a file of the script's own
        values = {**recipe.values, **self.values}
        places = {**dict.fromkeys(self.values, self.name), **recipe.places, **self.places}
        return self._replace(values=values, places=places, format=recipe.format or self.format or whose(values))

    def place(self, key: str) -> str:
        """Where an argument stands."""
        return self.places.get(key, self.name)


def of_config(source: Source) -> Supplied:
    """What a file of TrainingArguments or of Accelerate says.

    Raises:
        ConfigError: It is neither.
    """
    places = {key: str(source.origins.of((key,))) for key in source.data}
    try:
        name = catalog.recognise(source).name
    except ConfigError:
        if not source.data.keys() & catalog.get("hf").keys.keys():
            raise
        return Supplied(source.name, source.data, places, "")
    if name == "accelerate":
        format_ = catalog.get(name)
        ranks = format_.ranks(source)
        return Supplied(
            source.name, source.data, places, name, ranks, format_.launch(format_.read(source)), launcher=source
        )
    if name == "hf":
        inner = trainer().arguments_in(source.data)
        return Supplied(source.name, inner, places, name)
    if name not in TRAINER:
        what = (
            f"is a config of {catalog.get(name).tool}; give --with a launch script, TrainingArguments or a config "
            "of Accelerate"
        )
        raise ConfigError([Problem("", what, source.name)])
    return Supplied(source.name, source.data, places, name)


def whose(values: Mapping[str, Any]) -> str:
    """Whose arguments they are: TrainingArguments' where they surely are, or those of a tool around it; empty
    otherwise.
    """
    if _SURE not in values or values.keys() & set(_NEVER_TRAINER) or values.get("deepspeed") is True:
        return ""
    if len(values.keys() & set(_ONLY_TRAINER)) < _LEAST:
        return ""
    weights = {name: catalog.get(name).signs.weight(values) for name in TRAINER}
    return max(TRAINER, key=lambda name: weights[name])
