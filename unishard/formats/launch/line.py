"""The one command that starts a training: its launcher, the launcher's options, and the words that the training script
gets.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from unishard.errors import ConfigError, Problem
from unishard.formats.names import names

COMMAND = "the command"
"""What reports call it."""
_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
}
_SUBCOMMANDS = {
    "accelerate": ("launch",),
    "llamafactory-cli": ("train",),
    "trl": ("sft", "dpo", "grpo", "kto", "reward", "rloo"),
}
"""Tools that start the training only with one of these words."""
_IS_SCRIPT = ("llamafactory-cli", "trl")
"""Launchers that are the training script as well."""
_FLAGS = frozenset(
    names(
        # torchrun (torch 2.11, distributed/run.py) and the older torch.distributed.launch
        "standalone module m no_python run_path use_env no_cuda_numa_affinity "
        # deepspeed 0.19.8, launcher/runner.py
        "force_multi no_local_rank enable_each_rank_log save_pid bind_cores_to_rank no_ssh elastic_training "
        # accelerate 1.15.0, commands/launch.py
        "cpu multi_gpu tpu ipex use_xpu use_deepspeed use_fsdp use_megatron_lm use_parallelism_config same_network "
        "debug quiet q dynamo_use_fullgraph dynamo_use_dynamic dynamo_use_regional_compilation tpu_use_cluster "
        "no_tpu_cluster tpu_use_sudo main_training_function_only enable_cpu_affinity v verbose"
    )
)
"""Options of launchers without a value."""
_PYTHON = re.compile(r"python[\d.]*")
_QUOTED = re.compile(r"'[^']*'|\\.|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_SHELL = re.compile(r"\$[\w({@*#?!]+|`|\n|&&|\|\||[|;&<>()]|^\s*(?:for|while|until|if|case)\b")
_KNOWN = (
    "accelerate launch, torchrun, deepspeed, python -m torch.distributed.run, llamafactory-cli train, trl sft, python"
)


class LaunchLine(NamedTuple):
    """How a command starts the training."""

    launcher: str
    """Such as torchrun; `python` where nothing starts several processes."""
    options: dict[str, str]
    """Those of the launcher, with `_` for `-`, and their values."""
    arguments: list[str]
    """What the training script gets."""
    settings: dict[str, str]
    """Environment variables in front."""


def launch_line(command: str) -> LaunchLine:
    """Read a command.

    Raises:
        ConfigError: It holds shell syntax, or starts no training that unishard knows.
    """
    words = _words(command)
    settings: dict[str, str] = {}
    for at, argument in enumerate(words):
        name, equals, value = argument.partition("=")
        if equals and name.isidentifier():
            settings[name] = value
        elif start := _started(argument, words[at + 1 :]):
            launcher, behind = start
            options, script = ({}, behind) if launcher in _IS_SCRIPT else options_of(behind)
            arguments = script if launcher in _IS_SCRIPT else _behind_script(script)
            return LaunchLine(launcher, options, arguments, settings)
    raise _error(f"starts no training that unishard knows; write one that begins with one of {_KNOWN}")


def _words(command: str) -> list[str]:
    """The words of a command.

    Raises:
        ConfigError: It is not one command with its values.
    """
    text = command.strip().replace("\\\n", " ")
    if syntax := _SHELL.search(_QUOTED.sub(_expanding, text)):
        obstacle = (
            "a second line" if syntax.group() == "\n" else f"{syntax.group().strip()!r}, which only a shell reads"
        )
        raise _error(f"has {obstacle}; write the one command that trains, with its values")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise _error(f"cannot be split into words ({error}); close the quotes") from None


def _expanding(quoted: re.Match[str]) -> str:
    """What a shell would still expand between quotes."""
    text = quoted.group()
    return "".join(re.findall(r"(?<!\\)\$[\w({]+|(?<!\\)`", text)) if text.startswith('"') else ""


def _error(message: str) -> ConfigError:
    return ConfigError([Problem("", message, COMMAND)])


def _started(argument: str, following: Sequence[str]) -> tuple[str, list[str]] | None:
    """The launcher that a word is, and what follows it."""
    name, behind = PurePath(argument).name, list(following)
    if name in _SUBCOMMANDS:
        return (name, behind[1:]) if behind and behind[0] in _SUBCOMMANDS[name] else None
    if name in ("deepspeed", "torchrun"):
        return name, behind
    if not _PYTHON.fullmatch(name):
        return None
    while behind and behind[0].startswith("-") and behind[0] != "-m":
        behind = behind[1:]
    if len(behind) > 1 and behind[0] == "-m" and behind[1] in _MODULES:
        return _MODULES[behind[1]], behind[2:]
    started = bool(behind) and (behind[0] == "-m" or behind[0].endswith(".py"))
    return ("python", behind) if started else None


def options_of(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The launcher's options at the beginning of words, each with its value, and the words from the first that is
    none.
    """
    options: dict[str, str] = {}
    at = 0
    while at < len(words) and words[at].startswith("-"):
        name, equals, value = words[at].partition("=")
        key = name.lstrip("-").replace("-", "_")
        takes = not equals and key not in _FLAGS and at + 1 < len(words)
        options[key] = words[at + 1] if takes else value if equals else "true"
        at += 2 if takes else 1
    return options, list(words[at:])


def _behind_script(words: Sequence[str]) -> list[str]:
    """What follows the training script, or the module that is one."""
    return list(words[2:] if words and words[0] == "-m" else words[1:])


_NAME = re.compile(r"--?([A-Za-z_][\w.-]*)(?:=(.*))?", re.DOTALL)
_BOOLEANS = {"true": True, "false": False}


def script_arguments(words: Sequence[str]) -> Mapping[str, Any]:
    """The arguments of a training script: `--name value`, `--name=value`, and `--name` without a value, which is
    true; several values are a list.
    """
    values: dict[str, Any] = {}
    at = 0
    while at < len(words):
        named = _NAME.fullmatch(words[at])
        at += 1
        if named is None:
            continue
        texts = [named.group(2)] if named.group(2) is not None else []
        while at < len(words) and not _NAME.fullmatch(words[at]):
            texts += [words[at]] if named.group(2) is None else []
            at += 1
        parsed = [value_of_word(text) for text in texts]
        values[named.group(1).replace("-", "_")] = True if not parsed else parsed[0] if len(parsed) == 1 else parsed
    return values


def value_of_word(text: str) -> Any:
    """The value that a word stands for."""
    if text.lower() in _BOOLEANS:
        return _BOOLEANS[text.lower()]
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
