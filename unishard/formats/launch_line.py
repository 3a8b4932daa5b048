"""The line of a shell script that starts a training: its launcher, the launcher's options, and the words that the
training script gets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from unishard.formats.names import names
from unishard.formats.shell_words import Word, commands

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
_FLAGS = frozenset(
    names(
        # torchrun (torch 2.11, distributed/run.py) and the older torch.distributed.launch
        "standalone module m no_python run_path use_env no_cuda_numa_affinity "
        # deepspeed 0.19.8, launcher/runner.py
        "force_multi no_local_rank enable_each_rank_log save_pid bind_cores_to_rank no_ssh elastic_training "
        # accelerate 1.15.0, commands/launch.py
        "cpu multi_gpu tpu ipex use_xpu use_deepspeed use_fsdp use_megatron_lm use_parallelism_config same_network "
        "debug quiet q dynamo_use_fullgraph dynamo_use_dynamic dynamo_use_regional_compilation tpu_use_cluster "
        "no_tpu_cluster tpu_use_sudo main_training_function_only enable_cpu_affinity v verbose "
        # srun and mpirun
        "exclusive label l u unbuffered kill_on_bad_exit overlap allow_run_as_root oversubscribe"
    )
)
_HARMLESS = names(
    "echo printf pip pip3 which cd source cat ls mkdir rm cp kill pkill ps module export alias function install"
)
"""Commands that only name a launcher."""
_PYTHON = re.compile(r"(?:.*/)?python[\d.]*|\$\{?PYTHON\w*\}?")
_FENCE = re.compile(r"\s*(?:```|~~~)\s*(\w*)")
_SHELL = ("", "bash", "sh", "shell", "zsh", "console")
_SCRIPT = re.compile(r"(?:\$\([^()]*\)|[^\s$]|\$(?!\())+\.py")


class LaunchLine(NamedTuple):
    """How a script starts the training."""

    launcher: str
    """Such as torchrun; `python` where nothing starts several processes."""
    line: int
    options: dict[str, Word]
    """Those of the launcher, with `_` for `-`, and those of srun around it, with their values."""
    arguments: list[Word]
    """What the training script gets."""
    settings: dict[str, Word]
    """Environment variables that the line sets."""


def code_in(page: str) -> str:
    """The blocks of shell commands of a Markdown page, each line in its place."""
    found: list[str] = []
    language: str | None = None
    for line in page.splitlines():
        fence = _FENCE.match(line)
        found.append(line.strip().removeprefix("$ ") if language in _SHELL and not fence else "")
        if fence:
            language = fence[1] if language is None else None
    return "\n".join(found)


def launch_lines(text: str) -> list[LaunchLine]:
    """Those that a shell script has, in its order; plain `python` lines only where no other launcher is there."""
    found = [line for words in commands(text) if len(words) <= _MOST_WORDS and (line := _launch(words)) is not None]
    launched = [line for line in found if line.launcher != "python" or _STARTS & line.options.keys()]
    return launched or found


_MOST_WORDS = 2000
"""Of a command that can start a training."""
_MOST_HANDED = 8
"""Times that a command hands the rest of its words on with `--`."""
_STARTS = frozenset(("ntasks", "n", "np", "ntasks_per_node"))


def _launch(words: list[Word]) -> LaunchLine | None:
    """What a command starts, or the innermost one that it hands its words on to with `--`."""
    handed_on = [at + 1 for at, word in enumerate(words) if word.text == "--"]
    begins = [0, *handed_on[-_MOST_HANDED:]]
    return next((found for begin in reversed(begins) if (found := _launch_itself(words[begin:]))), None)


def _launch_itself(words: list[Word]) -> LaunchLine | None:
    settings, rest = _settings(words)
    around: dict[str, Word] = {}
    for at, word in enumerate(rest):
        name = PurePath(word.text).name
        following = rest[at + 1 :]
        if name in _HARMLESS:
            return None
        if "=" in word.text and word.text.partition("=")[0].isidentifier():
            settings[word.text.partition("=")[0]] = word._replace(text=word.text.partition("=")[2])
        elif name in ("srun", "mpirun", "mpiexec"):
            around = options_of(following, _FLAGS)[0]
        elif start := _started(name, word, following):
            launcher, behind = start
            options, arguments = ({}, behind) if launcher in _DIRECT else options_of(behind, _FLAGS)
            script = arguments if launcher in _DIRECT else _behind_script(arguments)
            return LaunchLine(launcher, word.line, {**around, **options}, script, settings)
    return None


_DIRECT = ("trl", "llamafactory-cli")
"""Launchers that are the training script as well."""


def _settings(words: Sequence[Word]) -> tuple[dict[str, Word], list[Word]]:
    """Environment variables before the command, and the command."""
    found: dict[str, Word] = {}
    for at, word in enumerate(words):
        name, equals, value = word.text.partition("=")
        if not equals or not name.isidentifier():
            return found, list(words[at:])
        found[name] = Word(value, word.line)
    return found, []


def _started(name: str, word: Word, following: list[Word]) -> tuple[str, list[Word]] | None:
    """The launcher that a word is, and what follows it."""
    if name in _SUBCOMMANDS:
        return (name, following[1:]) if following and following[0].text in _SUBCOMMANDS[name] else None
    if name in ("deepspeed", "torchrun"):
        return name, following
    if not _PYTHON.fullmatch(word.text):
        return None
    while following and following[0].text.startswith("-") and following[0].text != "-m":
        following = following[1:]
    if len(following) > 1 and following[0].text == "-m" and following[1].text in _MODULES:
        return _MODULES[following[1].text], following[2:]
    started = bool(following) and (following[0].text == "-m" or _SCRIPT.fullmatch(following[0].text) is not None)
    return ("python", following) if started else None


def options_of(words: Sequence[Word], flags: frozenset[str] = frozenset()) -> tuple[dict[str, Word], list[Word]]:
    """The options at the beginning of words, each with its value, and the words from the first that is none.

    Args:
        words: The words.
        flags: Options without a value; every other takes the next word, if it has none behind a `=`.
    """
    found: dict[str, Word] = {}
    at = 0
    while at < len(words) and words[at].text.startswith(("-", "$")) and not _SCRIPT.fullmatch(words[at].text):
        name, equals, value = words[at].text.partition("=")
        key = name.lstrip("-").replace("-", "_")
        takes = not equals and key not in flags and name.startswith("-") and at + 1 < len(words)
        found[key] = (
            words[at + 1]._replace(line=words[at].line) if takes else Word(value if equals else "true", words[at].line)
        )
        at += 2 if takes else 1
    return found, list(words[at:])


def _behind_script(words: Sequence[Word]) -> list[Word]:
    """What follows the training script, or the module that is one."""
    return list(words[2:] if words and words[0].text == "-m" else words[1:])


_NAME = re.compile(r"--?([A-Za-z_][\w.-]*)(?:=(.*))?", re.DOTALL)
_BOOLEANS = {"true": True, "false": False}
_EXPANSION = re.compile(r"\$\(\(?(.*?)\)?\)|`(.*?)`|\$(\w+)", re.DOTALL)
_REST = re.compile(r"\$\{?[@*].*")
"""The arguments of the shell script itself."""
_OPTIONS = re.compile(r"\$\w+|\$\{[^}]*\}+|\$\(.*\)|`.*`", re.DOTALL)
"""What may hold options of its own where it follows a value."""


class ScriptArguments(NamedTuple):
    """The arguments of a training script."""

    values: Mapping[str, Any]
    lines: Mapping[str, int]


def script_arguments(words: Sequence[Word]) -> ScriptArguments:
    """Read `--name value`, `--name=value`, and `--name` alone, which is true; several values are a list.

    The value of a variable that is not known is a placeholder such as `${NAME}`. One behind a value that is known
    holds other options, and stands for itself.
    """
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    words = [word for word in words if not _REST.fullmatch(word.text)]
    at = 0
    while at < len(words):
        named = _NAME.fullmatch(words[at].text)
        at += 1
        if named is None:
            continue
        name = named.group(1).replace("-", "_")
        given = [named.group(2)] if named.group(2) is not None else []
        lines[name] = words[at - 1].line
        while at < len(words) and not _NAME.fullmatch(words[at].text):
            word, held = words[at], given and not given[-1].startswith(("$", "`"))
            if held and _OPTIONS.fullmatch(word.text):
                values[word.text], lines[word.text] = True, word.line
            elif named.group(2) is None:
                given.append(word.text)
            at += 1
        found = [value_of_word(text) for text in given]
        values[name] = True if not found else found[0] if len(found) == 1 else found
    return ScriptArguments(values, lines)


def value_of_word(text: str) -> Any:
    """The value that a word stands for."""
    if text.lower() in _BOOLEANS:
        return _BOOLEANS[text.lower()]
    if text.lstrip().startswith("{") and not text.startswith("{{"):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return _EXPANSION.sub(_placeholder, text)


def _placeholder(expansion: re.Match[str]) -> str:
    inner = next(group for group in expansion.groups() if group is not None)
    return "${" + re.sub(r"[${}]", "", inner) + "}"
