"""Finds the files that a launch line names: the launcher's config, and the recipe of the training script."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from unishard.contract.entries import Entry, KeyEffect
from unishard.contract.rules import Fit
from unishard.errors import ConfigError
from unishard.formats.launch_line import LaunchLine
from unishard.formats.shell_words import Word
from unishard.formats.source import Source, find_named, open_source

LAUNCHER = "accelerate --config-file"
_RECIPE = "config"
_CONFIGS = (".yaml", ".yml", ".json")
_PLACEHOLDER = re.compile(r"\$\w+|\$?\{[^{}]*\}|<[^<>/]*>")
"""As in the README of a project: `recipes/{model}/config.yaml`."""


class Named(NamedTuple):
    """A file that a launch line names."""

    option: str
    """As people write it."""
    word: Word
    path: Path | None
    """Where it is; None where it was not found."""

    def refers_to(self, document: Path) -> bool:
        """Whether it is this document; where the file was not found, the end of the path decides."""
        return self.path.samefile(document) if self.path else names(self.word.text, document)


def launcher_named(line: LaunchLine, script: str) -> Named | None:
    """The config of Accelerate that a line names; None where it names none."""
    word = line.options.get("config_file") if line.launcher == "accelerate" else None
    return Named(LAUNCHER, word, find_named(word.text, _folder(script))) if word else None


def recipe_named(line: LaunchLine, script: str) -> Named | None:
    """The file of arguments that a line hands to its training script: behind `--config`, or before all options."""
    option, word = next(_recipes(line), ("", None))
    return Named(option, word, find_named(word.text, _folder(script))) if word else None


def _recipes(line: LaunchLine) -> Iterator[tuple[str, Word]]:
    for at, word in enumerate(line.arguments):
        name, equals, value = word.text.partition("=")
        if at == 0 and word.text.lower().endswith(_CONFIGS) and not word.text.startswith("-"):
            yield "config", word
        elif name == f"--{_RECIPE}":
            given = word._replace(text=value) if equals else next(iter(line.arguments[at + 1 :]), None)
            if given and given.text.lower().endswith(_CONFIGS):
                yield name, given


def names(name: str, document: Path) -> bool:
    """Whether a document's path ends in a name, which may have placeholders; a name that is only a placeholder matches
    nothing.
    """
    pattern = _PLACEHOLDER.sub("*", name.removeprefix("./"))
    stem, dot, _ = pattern.rpartition(".")
    return bool(dot and stem.strip("*/.")) and fnmatchcase(document.resolve().as_posix(), f"*/{pattern}")


def _folder(script: str) -> Path | None:
    return Path(script).parent if Path(script).is_file() else None


def opened(named: Named, place: str) -> Source | Entry:
    """What a named file says, or the entry that says why it counts for nothing."""
    if named.path is None:
        where = "in the working directory, beside the script and in the folders above it"
        return missing(
            named, place, f"was not found ({where}): what it says is unknown; add it, or run where it is started"
        )
    try:
        return open_source(named.path)
    except ConfigError as error:
        return missing(named, place, str(error))


def missing(named: Named, place: str, note: str) -> Entry:
    """The entry of a named file that counts for nothing."""
    return Entry(
        (named.option,), named.word.text, KeyEffect(Fit.APPROXIMATE, note, notable=True), place=place, from_sidecar=True
    )
