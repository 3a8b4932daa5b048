"""What a launch script, a file of TrainingArguments or the words of a command line say beside a config."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from unishard.config.loading import Origin, Origins
from unishard.config.loading.document import text_of
from unishard.config.loading.hostfile import hosts_of
from unishard.config.nested import merge, nested
from unishard.config.topology import Topology
from unishard.contract.entries import Entry
from unishard.errors import ConfigError, Problem
from unishard.formats import catalog
from unishard.formats.dropping import DroppedKey, drop_keys
from unishard.formats.launch_entries import launch_entries
from unishard.formats.launch_line import LaunchLine, code_in, launch_lines, script_arguments, value_of_word
from unishard.formats.launching import Launch, launch_of, with_hosts
from unishard.formats.names import names
from unishard.formats.shell_words import Word
from unishard.formats.sidecar.following import Named, launcher_named, opened, recipe_named
from unishard.formats.source import Source, find_named, open_source

TRAINER = ("hf", "trl", "llamafactory")
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


class Sidecar(NamedTuple):
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
    options: frozenset[str] = frozenset()
    """Arguments that stand for options of the launcher, which its config says as well."""
    recipe: Named | None = None
    """The file of arguments that a launch line hands to its script."""

    def without(self, patterns: Iterable[str]) -> tuple[Sidecar, list[DroppedKey]]:
        """The same without the arguments that match, and those."""
        found = {key: pattern for key in self.values for pattern in patterns if fnmatchcase(key, pattern)}
        dropped = [DroppedKey(key, self.values[key], None, pattern) for key, pattern in found.items()]
        launcher, further = drop_keys(self.launcher, tuple(patterns)) if self.launcher else (None, [])
        values = {key: value for key, value in self.values.items() if key not in found}
        return self._replace(values=values, launcher=launcher), [*dropped, *further]

    def with_recipe(self) -> Sidecar:
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


def of_config(source: Source) -> Sidecar:
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
        return Sidecar(source.name, source.data, places, "")
    if name == "accelerate":
        format_ = catalog.get(name)
        ranks = format_.ranks(source)
        return Sidecar(
            source.name, source.data, places, name, ranks, format_.launch(format_.read(source)), launcher=source
        )
    if name == "hf":
        inner = trainer().arguments_in(source.data)
        return Sidecar(source.name, inner, places, name)
    if name not in TRAINER:
        what = (
            f"is a config of {catalog.get(name).tool}; give --with a launch script, TrainingArguments or a config "
            "of Accelerate"
        )
        raise ConfigError([Problem("", what, source.name)])
    return Sidecar(source.name, source.data, places, name)


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


_KINDS = {"use_deepspeed": "DEEPSPEED", "use_fsdp": "FSDP", "use_megatron_lm": "MEGATRON_LM"}
_FILE = "deepspeed_config_file"
_OF_LOOP = ("gradient_accumulation_steps", "gradient_clipping")
_DEEPSPEED = names(
    "zero_stage offload_optimizer_device offload_param_device offload_optimizer_nvme_path offload_param_nvme_path "
    f"zero3_save_16bit_model zero3_init_flag deepspeed_moe_layer_cls_names {_FILE}"
)


def _engine_options(line: LaunchLine) -> Iterator[tuple[str, Word]]:
    """Those that choose and configure the engine, by the dotted keys of Accelerate's config (1.15.0,
    commands/launch.py).
    """
    for option, word in line.options.items() if line.launcher == "accelerate" else ():
        if option in _KINDS:
            yield "distributed_type", word._replace(text=_KINDS[option])
        elif option in _DEEPSPEED:
            yield f"deepspeed_config.{option}", word
        elif option.startswith("fsdp_"):
            yield f"fsdp_config.{option}", word


def _loop_options(line: LaunchLine, engine: Word | None, file: Source | None) -> dict[str, Word]:
    """Those that say beside an engine what the loop does."""
    chosen = engine.text if engine else file and file.data.get("distributed_type")
    options = line.options if line.launcher == "accelerate" else {}
    block = "deepspeed_config." if chosen == "DEEPSPEED" else None
    found = {f"{block}{name}": options[name] for name in _OF_LOOP if name in options and block is not None}
    return found | ({"mixed_precision": options["mixed_precision"]} if "mixed_precision" in options else {})


def with_engine_options(line: LaunchLine, file: Source | None, script: str) -> Source | None:
    """The config of the launcher, in which these options count more than its file.

    Args:
        line: A launch line.
        file: The config that it names.
        script: Where the line stands.
    """
    said = dict(_engine_options(line))
    if file or said:
        said |= _loop_options(line, said.get("distributed_type"), file)
    if not said:
        return file
    base = file or Source(script, {}, Origins(Origin(script)), folder=Path(script).parent)
    origins = base.origins.below(())
    for key, word in said.items():
        origins.put(tuple(key.split(".")), Origin(script, word.line or None))
    return base._replace(
        data=merge(base.data, nested({key: _value(key, word, script) for key, word in said.items()})), origins=origins
    )


def _value(key: str, word: Word, script: str) -> Any:
    found = find_named(word.text, Path(script).parent) if key.endswith(_FILE) else None
    return str(found.resolve()) if found else value_of_word(word.text)


_NAMING = ("deepspeed", "fsdp_config")
"""Arguments that name a file of the engine's."""
_DIRECT = {"trl": "trl", "llamafactory-cli": "llamafactory"}
_PROCESSES = names("num_processes num_machines machine_rank main_process_ip main_process_port gpu_ids")
"""Keys of Accelerate's config that are options of its launcher too."""


def of_line(line: LaunchLine, name: str, script: str, *, numbered: bool = True) -> Sidecar:
    """What the line says.

    Args:
        line: The line.
        name: Of the script or page that it stands in.
        script: The text around it.
        numbered: Whether the report names its number.
    """
    arguments = script_arguments(line.arguments)
    values, lines = (
        {key: _named_here(key, value, name) for key, value in arguments.values.items()},
        dict(arguments.lines),
    )
    recipe = recipe_named(line, name)
    if recipe:
        values.pop("config", None)
    format_ = _DIRECT.get(line.launcher) or whose(values)
    for key, value, at in _of_launcher(line):
        if key not in values:
            values[key], lines[key] = value, at
    file, missing = _launcher(line, name, numbered=numbered)
    launcher = with_engine_options(line, file, name)
    topology, launch = launch_of(_with_options(line, launcher), script)
    if hosts := _hosts(launch, name):
        topology, launch = with_hosts(launch, hosts)
    started = launch_entries(line, launch, lambda word: f"{name}:{word.line}" if numbered else name)
    places = {key: f"{name}:{at}" for key, at in lines.items()} if numbered else {}
    options = frozenset(values.keys() - arguments.values.keys()) if launcher else frozenset()
    return Sidecar(name, values, places, format_, topology, launch, tuple(started), launcher, missing, options, recipe)


def _named_here(key: str, value: Any, script: str) -> Any:
    """The value; that of a file's name as one can open it from here."""
    found = find_named(value, Path(script).parent) if key in _NAMING and isinstance(value, str) else None
    return str(found) if found else value


def _launcher(line: LaunchLine, name: str, *, numbered: bool) -> tuple[Source | None, tuple[Entry, ...]]:
    """The config of Accelerate that a line names, or the entry that says why it counts for nothing."""
    named = launcher_named(line, name)
    if named is None:
        return None, ()
    file = opened(named, f"{name}:{named.word.line}" if numbered else name)
    return (file, ()) if isinstance(file, Source) else (None, (file,))


def _with_options(line: LaunchLine, launcher: Source | None) -> LaunchLine:
    """The line with what its launcher's config says of the processes, where its own options do not."""
    said = {key: launcher.data[key] for key in _PROCESSES if launcher and launcher.data.get(key) is not None}
    return line._replace(options={**{key: Word(str(value), line.line) for key, value in said.items()}, **line.options})


def _hosts(launch: Launch, name: str) -> Mapping[str, int]:
    """Those of the hostfile that a launch line names, relative to this folder or to the script's; empty where it is not
    there.
    """
    if launch.hosts is None:
        return {}
    found = next((path for path in (Path(launch.hosts), Path(name).parent / launch.hosts) if path.is_file()), None)
    return hosts_of(found) if found else {}


def _of_launcher(line: LaunchLine) -> Iterator[tuple[str, Any, int]]:
    """What the options of `accelerate launch` say about the training."""
    if line.launcher != "accelerate":
        return
    for option, key in (
        ("gradient_accumulation_steps", "gradient_accumulation_steps"),
        ("gradient_clipping", "max_grad_norm"),
    ):
        if option in line.options:
            yield key, value_of_word(line.options[option].text), line.options[option].line
    word = line.options.get("mixed_precision")
    if word and word.text in ("bf16", "fp16"):
        yield word.text, True, word.line


PAGES = (".md", ".markdown")
"""Whose code blocks may hold a launch line."""
_CONFIGS = (".yaml", ".yml", ".json", ".toml")
_LINE = re.compile(r"(.+):(\d+)")
_HERE = "the command line"


def open_sidecar(where: str | Path | Sequence[str]) -> Sidecar:
    """Open what is to be read beside a config.

    Args:
        where: A shell script, with `:LINE` behind it if it starts several trainings; a YAML or JSON file of
            TrainingArguments or of Accelerate; or the words of a command line.

    Raises:
        ConfigError: It cannot be read, or holds none of these.
    """
    if isinstance(where, str | Path):
        return of_config(open_source(Path(where))) if Path(where).suffix.lower() in _CONFIGS else _script(str(where))
    return _of_words(list(where))


def _script(name: str) -> Sidecar:
    numbered = None if Path(name).is_file() else _LINE.fullmatch(name)
    path = Path(numbered.group(1) if numbered else name)
    text = script_text(path)
    found = launch_lines(text)
    if numbered:
        asked = int(numbered.group(2))
        found = [line for line in found if _spans(line, asked)]
    if not found:
        what = (
            "starts no training that unishard knows (deepspeed, torchrun, accelerate launch, srun, python -m "
            "torch.distributed.run)"
        )
        raise ConfigError([Problem("", f"{what}; give the arguments behind -- instead", name)])
    if len(found) > 1 and any(_said(line) != _said(found[0]) for line in found[1:]):
        lines = ", ".join(str(line.line) for line in found)
        raise ConfigError(
            [Problem("", f"starts several trainings (lines {lines}); name one: --with {path}:{found[0].line}", name)]
        )
    return of_line(found[-1], str(path), text)


def script_text(path: Path) -> str:
    """The commands of a shell script, or of the code blocks of a Markdown page."""
    text = text_of(path)
    return code_in(text) if path.suffix.lower() in PAGES else text


def _spans(line: LaunchLine, asked: int) -> bool:
    # Words of a variable stand above the line.
    return line.line <= asked <= max([line.line, *(word.line for word in line.arguments)])


def _said(line: LaunchLine) -> object:
    return line.launcher, [word.text for word in line.arguments], {key: word.text for key, word in line.options.items()}


def _of_words(words: list[str]) -> Sidecar:
    """The words of a launch line, or only the arguments of a training script."""
    found = launch_lines(" ".join(_quoted(word) for word in words)) if words and not words[0].startswith("-") else []
    if found:
        return of_line(found[0], _HERE, "", numbered=False)
    if words and not words[0].startswith("-"):
        what = (
            "unexpected argument; name one config, and write what the training script gets behind --, as "
            "--learning_rate 1e-4"
        )
        raise ConfigError([Problem("", what, words[0])])
    arguments = script_arguments([Word(word, 0) for word in words])
    return Sidecar(_HERE, arguments.values, {}, whose(arguments.values))


def _quoted(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"
