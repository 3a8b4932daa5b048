"""Opens what is to be read beside a config: what `--with` names, or the words behind `--`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from unishard.config.loading.document import text_of
from unishard.errors import ConfigError, Problem
from unishard.formats.launch_line import LaunchLine, code_in, launch_lines
from unishard.formats.script_arguments import script_arguments
from unishard.formats.shell_words import Word
from unishard.formats.source import open_source
from unishard.formats.supplied import Supplied, of_config, whose
from unishard.formats.supplied_line import of_line

__all__ = ["PAGES", "script_text", "supplied"]

PAGES = (".md", ".markdown")
"""Whose code blocks may hold a launch line."""
_CONFIGS = (".yaml", ".yml", ".json", ".toml")
_LINE = re.compile(r"(.+):(\d+)")
_HERE = "the command line"


def supplied(where: str | Path | Sequence[str]) -> Supplied:
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


def _script(name: str) -> Supplied:
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
    return line.line <= asked <= max((word.line for word in line.arguments), default=line.line)


def _said(line: LaunchLine) -> object:
    return line.launcher, [word.text for word in line.arguments], {key: word.text for key, word in line.options.items()}


def _of_words(words: list[str]) -> Supplied:
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
    return Supplied(_HERE, arguments.values, {}, whose(arguments.values))


def _quoted(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"
