"""What `--with` names beside a config: a file of an engine, a launcher or TrainingArguments, or a command."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from unishard.config.loading import Origin, Origins
from unishard.config.loading.hostfile import hosts_of
from unishard.config.nested import merge, nested
from unishard.config.topology import Topology
from unishard.contract.entries import Entry
from unishard.errors import ConfigError, Problem
from unishard.formats import catalog
from unishard.formats.beside.engine_choice import RECIPES
from unishard.formats.files.source import Source, find_named, open_source
from unishard.formats.launch.entries import launch_entries
from unishard.formats.launch.line import COMMAND, LaunchLine, launch_line, script_arguments, value_of_word
from unishard.formats.launch.processes import Launch, launch_of, with_hosts
from unishard.formats.names import names
from unishard.formats.reading.document import ReadDocument
from unishard.formats.reading.dropping import DroppedKey, drop_keys

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
    return catalog.get(RECIPES[0])


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
    """What a command says about hosts and processes."""
    launcher: Source | None = None
    """The config of Accelerate from which the training is started."""
    without_engine: str = ""
    """The launcher of a command, where it brings no engine of its own: torchrun."""
    options: frozenset[str] = frozenset()
    """Arguments that stand for options of the launcher, which its config says as well."""
    recipe: Path | None = None
    """The file of arguments that a command hands to its script."""
    unknown: tuple[str, ...] = ()
    """Arguments that are the script's own."""

    @property
    def tool(self) -> str:
        """The tool whose arguments and defaults they are; empty where only what is written counts."""
        return catalog.get(self.format).tool if self.format in RECIPES else ""

    def starts(self, reading: ReadDocument) -> bool:
        """Whether a command hands the document to its script, so that its own words count more than those of the
        document.
        """
        folder = reading.source.folder
        return self.recipe is not None and folder is not None and self.recipe.samefile(reading.source.name)

    def without(self, patterns: Iterable[str]) -> tuple[Supplied, list[DroppedKey]]:
        """The same without the arguments that match, and those."""
        matched = {key: pattern for key in self.values for pattern in patterns if fnmatchcase(key, pattern)}
        dropped = [DroppedKey(key, self.values[key], None, pattern) for key, pattern in matched.items()]
        launcher, further = drop_keys(self.launcher, tuple(patterns)) if self.launcher else (None, [])
        values = {key: value for key, value in self.values.items() if key not in matched}
        return self._replace(values=values, launcher=launcher), [*dropped, *further]

    def with_recipe(self) -> Supplied:
        """The same with the arguments of the recipe, which yield to those of the command."""
        if self.recipe is None:
            return self
        file = open_source(self.recipe)
        try:
            recipe = of_config(file)
        except ConfigError:
            return self  # a file of the script's own
        values = {**recipe.values, **self.values}
        places = {**recipe.places, **dict.fromkeys(self.values, self.name), **self.places}
        return self._replace(values=values, places=places, format=recipe.format or self.format or whose(values))

    def entries(self, data: Mapping[str, Any], source: Source) -> list[Entry]:
        """What arguments say, with the defaults of the tool that takes them, where that is known."""
        document = source._replace(data=data)
        if self.format:
            return list(catalog.get(self.format).entries(document, self.topology))
        written: list[Entry] = trainer().only_written(document, self.topology)
        return written

    def place(self, key: str) -> str:
        """Where an argument stands."""
        return self.places.get(key, self.name)

    @property
    def default(self) -> str:
        """Where a value that is not in the file comes from."""
        tool = catalog.get(self.format).tool
        return f"default of {f'TrainingArguments ({tool})' if self.format == 'hf' else tool}"

    def placed(self, entry: Entry) -> Entry:
        """The entry with where it comes from."""
        return entry._replace(place=self.default if entry.assumed else self.place(entry.path[0]), supplied=True)


_CONFIGS = (".yaml", ".yml", ".json", ".toml")
_SCRIPT = re.compile(r"\S+\.(sh|bash|zsh|slurm|sbatch|md|markdown|py|txt)(:\d+)?")


def open_supplied(where: str | Path, folder: Path | None) -> Supplied:
    """Open what `--with` names.

    Args:
        where: A file, or the command that trains.
        folder: The folder of the config, in which the files of the command are looked for as well.

    Raises:
        ConfigError: It cannot be read, or is none of these.
    """
    text = str(where)
    is_path = isinstance(where, Path) or _is_file(text)
    if Path(text).suffix.lower() in _CONFIGS and (is_path or len(text.split()) == 1):
        return of_config(open_source(Path(text)))
    if not (is_path or _SCRIPT.fullmatch(text)):
        return of_line(launch_line(text), folder)
    message = (
        "is not read, as a script or a page may start any number of trainings; give the one command that trains, in "
        "quotes: --with 'accelerate launch --config_file zero3.yaml train.py --learning_rate 1e-4'"
    )
    raise ConfigError([Problem("", message, text)])


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


def of_config(source: Source) -> Supplied:
    """What a file of TrainingArguments, DeepSpeed or Accelerate says.

    Raises:
        ConfigError: It is none of them.
    """
    places = {key: str(source.origins.of((key,))) for key in source.data}
    try:
        name = catalog.recognise(source).name
    except ConfigError:
        if not source.data.keys() & catalog.get("hf").keys.keys():
            raise
        return Supplied(source.name, source.data, places, "")
    if name == "deepspeed":
        return Supplied(source.name, {"deepspeed": str(Path(source.name).resolve())}, {}, "deepspeed")
    if name == "accelerate":
        format_ = catalog.get(name)
        ranks = format_.ranks(source)
        return Supplied(
            source.name, source.data, places, name, ranks, format_.launch(format_.read(source)), launcher=source
        )
    if name == "hf":
        inner = trainer().arguments_in(source.data)
        return Supplied(source.name, inner, places, name)
    if name not in RECIPES:
        message = (
            f"is a config of {catalog.get(name).tool}; give --with a config of DeepSpeed or Accelerate, "
            "TrainingArguments, or the command that trains"
        )
        raise ConfigError([Problem("", message, source.name)])
    return Supplied(source.name, source.data, places, name)


def whose(values: Mapping[str, Any]) -> str:
    """Whose arguments they are: TrainingArguments' where they surely are, or those of a tool around it; empty
    otherwise.
    """
    if _SURE not in values or values.keys() & set(_NEVER_TRAINER) or values.get("deepspeed") is True:
        return ""
    if len(values.keys() & set(_ONLY_TRAINER)) < _LEAST:
        return ""
    weights = {name: catalog.get(name).markers.weight(values) for name in RECIPES}
    return max(RECIPES, key=lambda name: weights[name])


_KINDS = {"use_deepspeed": "DEEPSPEED", "use_fsdp": "FSDP", "use_megatron_lm": "MEGATRON_LM", "multi_gpu": "MULTI_GPU"}
_FILE = "deepspeed_config_file"
_OF_LOOP = ("gradient_accumulation_steps", "gradient_clipping")
_DEEPSPEED = names(
    "zero_stage offload_optimizer_device offload_param_device offload_optimizer_nvme_path offload_param_nvme_path "
    f"zero3_save_16bit_model zero3_init_flag deepspeed_moe_layer_cls_names {_FILE}"
)


def _engine_options(line: LaunchLine) -> Iterator[tuple[str, str]]:
    """Those that choose and configure the engine, by the dotted keys of Accelerate's config (1.15.0,
    commands/launch.py).
    """
    for option, text in line.options.items() if line.launcher == "accelerate" else ():
        if option in _KINDS:
            yield "distributed_type", _KINDS[option]
        elif option in _DEEPSPEED:
            yield f"deepspeed_config.{option}", text
        elif option.startswith("fsdp_"):
            yield f"fsdp_config.{option}", text


def _loop_options(line: LaunchLine, engine: str | None, file: Source | None) -> dict[str, str]:
    """Those that say beside an engine what the loop does."""
    chosen = engine or (file and file.data.get("distributed_type"))
    options = line.options if line.launcher == "accelerate" else {}
    loop = {f"deepspeed_config.{name}": options[name] for name in _OF_LOOP if name in options}
    precision = {"mixed_precision": options["mixed_precision"]} if "mixed_precision" in options else {}
    return (loop if chosen == "DEEPSPEED" else {}) | precision


def _with_engine_options(line: LaunchLine, file: Source | None, folder: Path | None) -> Source | None:
    """The config of the launcher, in which the options of the command count more than its file."""
    options = dict(_engine_options(line))
    if file or options:
        options |= _loop_options(line, options.get("distributed_type"), file)
    if not options:
        return file
    base = file or Source(COMMAND, {}, Origins(Origin(COMMAND)), folder=folder or Path())
    origins = base.origins.below(())
    for key in options:
        origins.put(tuple(key.split(".")), Origin(COMMAND))
    values = {key: _value(key, text, folder) for key, text in options.items()}
    return base._replace(data=merge(base.data, nested(values)), origins=origins)


def _value(key: str, text: str, folder: Path | None) -> Any:
    path = find_named(text, folder) if key.endswith(_FILE) else None
    return str(path.resolve()) if path else value_of_word(text)


_NAMING = ("deepspeed", "fsdp_config")
"""Arguments that name a file of the engine's."""
_PROCESSES = names("num_processes num_machines machine_rank main_process_ip main_process_port gpu_ids")
"""Keys of Accelerate's config that are options of its launcher too."""


def of_line(line: LaunchLine, folder: Path | None) -> Supplied:
    """What a command says, with the files that it names.

    Raises:
        ConfigError: One of these files is not there, or cannot be read.
    """
    arguments = script_arguments(line.arguments)
    values = {key: _found(key, value, folder) for key, value in arguments.items()}
    recipe = _recipe(line, folder)
    if recipe:
        values.pop("config", None)
    format_ = _OWN_SCRIPTS.get(line.launcher) or whose(values)
    values = {**dict(_of_launcher(line)), **values}
    named = line.options.get("config_file") if line.launcher == "accelerate" else None
    file = open_source(_named("--config_file", named, folder)) if named else None
    launcher = _with_engine_options(line, file, folder)
    topology, launch = launch_of(_with_processes(line, launcher))
    if hosts := _hosts(launch, folder):
        topology, launch = with_hosts(launch, hosts)
    started = tuple(launch_entries(line, launch, COMMAND))
    options = frozenset(values.keys() - arguments.keys()) if launcher else frozenset()
    without_engine = "" if line.launcher == "accelerate" else line.launcher
    return Supplied(COMMAND, values, {}, format_, topology, launch, started, launcher, without_engine, options, recipe)


_OWN_SCRIPTS = {"trl": "trl", "llamafactory-cli": "llamafactory"}
"""Formats of the arguments of launchers that are the training script as well."""


def _recipe(line: LaunchLine, folder: Path | None) -> Path | None:
    """The file of arguments that a command hands to its script: behind `--config`, or before all options."""
    words = line.arguments
    if words and not words[0].startswith("-") and words[0].lower().endswith(_CONFIGS):
        return _named("the script's config", words[0], folder)
    name = script_arguments(words).get("config")
    if isinstance(name, str) and name.lower().endswith(_CONFIGS):
        return _named("--config", name, folder)
    return None


def _named(option: str, name: str, folder: Path | None) -> Path:
    """Where a file is that a command names."""
    path = find_named(name, folder)
    if path is None:
        message = (
            f"{option} names {name}, which was not found; give its path from here, or from the folder of the config"
        )
        raise ConfigError([Problem("", message, COMMAND)])
    return path


def _found(key: str, value: Any, folder: Path | None) -> Any:
    """The value; that of a file's name as one can open it from here."""
    path = find_named(value, folder) if key in _NAMING and isinstance(value, str) else None
    return str(path.resolve()) if path else value


def _with_processes(line: LaunchLine, launcher: Source | None) -> LaunchLine:
    """The line with what its launcher's config says of the processes, where its own options do not."""
    data = launcher.data if launcher else {}
    processes = {key: str(data[key]) for key in _PROCESSES if data.get(key) is not None}
    return line._replace(options={**processes, **line.options})


def _hosts(launch: Launch, folder: Path | None) -> Mapping[str, int]:
    """Those of the hostfile that a command names; empty where it is not there."""
    path = find_named(launch.hosts, folder) if launch.hosts is not None else None
    return hosts_of(path) if path else {}


def _of_launcher(line: LaunchLine) -> Iterator[tuple[str, Any]]:
    """What the options of `accelerate launch` say about the training."""
    options = line.options if line.launcher == "accelerate" else {}
    for option, key in (
        ("gradient_accumulation_steps", "gradient_accumulation_steps"),
        ("gradient_clipping", "max_grad_norm"),
    ):
        if option in options:
            yield key, value_of_word(options[option])
    if options.get("mixed_precision") in ("bf16", "fp16"):
        yield options["mixed_precision"], True
