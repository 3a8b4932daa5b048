"""What one launch line says beside a config: the script's arguments, the launcher's options and the files that they
name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unishard.config.loading.hostfile import hosts_of
from unishard.contract.entries import Entry
from unishard.formats.engine_options import with_engine_options
from unishard.formats.following import launcher_named, opened, recipe_named
from unishard.formats.launch_entries import launch_entries
from unishard.formats.launch_line import LaunchLine
from unishard.formats.launching import Launch, launch_of, with_hosts
from unishard.formats.names import names
from unishard.formats.script_arguments import script_arguments, value_of_word
from unishard.formats.shell_words import Word
from unishard.formats.source import Source, find_named
from unishard.formats.supplied import Supplied, whose

__all__ = ["of_line"]

_NAMING = ("deepspeed", "fsdp_config")
"""Arguments that name a file of the engine's."""
_DIRECT = {"swift": "swift", "trl": "trl", "llamafactory-cli": "llamafactory"}
_PROCESSES = names("num_processes num_machines machine_rank main_process_ip main_process_port gpu_ids")
"""Keys of Accelerate's config that are options of its launcher too."""


def of_line(line: LaunchLine, name: str, script: str, *, numbered: bool = True) -> Supplied:
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
    return Supplied(name, values, places, format_, topology, launch, tuple(started), launcher, missing, recipe)


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
