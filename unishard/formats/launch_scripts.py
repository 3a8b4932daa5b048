"""Which launch script, or which line of a README, starts the training with a config of a project."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from unishard.contract.rules import Fit
from unishard.errors import ConfigError
from unishard.formats.launch_line import LaunchLine, launch_lines
from unishard.formats.shell_words import Word
from unishard.formats.sidecar.following import names, recipe_named
from unishard.formats.sidecar.sidecar import PAGES, script_text
from unishard.formats.translating import Outcome, translate

_SCRIPTS = frozenset({".sh", ".bash", ".slurm", ".sbatch", *PAGES})
_LAUNCHER = ("distributed_type:", '"distributed_type"')
"""In each config of Accelerate."""


class _Launching(NamedTuple):
    """A line that starts a training."""

    place: str
    """What `--with` names."""
    line: LaunchLine


class LaunchScripts:
    """The launch scripts and pages of a project, looked for when a config needs one.

    Args:
        scripts: Those that may be one.
        configs: Those that may be a config of Accelerate.
    """

    suffixes = _SCRIPTS

    def __init__(self, scripts: Iterator[Path], configs: Iterator[Path]) -> None:
        self._scripts, self._configs = scripts, configs

    def filling(self, path: Path, to: str, plain: Outcome) -> tuple[str, Outcome]:
        """The first that starts a training with this config and does not contradict it, and the translation with it."""
        for place in dict.fromkeys(self._places(path)):
            try:
                found = translate(path, to, with_=place)
            except ConfigError:
                continue
            if len(found.of(Fit.UNSUPPORTED)) <= len(plain.of(Fit.UNSUPPORTED)):
                return place, found
        return "", plain

    def _places(self, path: Path) -> Iterator[str]:
        """Lines that name the config itself, then those whose name has a placeholder, then scripts that name it
        anywhere.
        """
        lines = [one for one in self._lines if _names(one, path)]
        yield from (one.place for one in lines if any(path.name in word.text for word in _words(one.line)))
        yield from (one.place for one in lines)
        yield from (
            str(script) for script, text in self._texts.items() if path.name in text and script.suffix not in PAGES
        )
        if len(self.launchers) == 1:
            yield from self.launchers

    @cached_property
    def launchers(self) -> list[str]:
        """The configs of Accelerate."""
        return [
            str(path) for path in self._configs if any(word in path.read_text(errors="replace") for word in _LAUNCHER)
        ]

    @cached_property
    def _texts(self) -> dict[Path, str]:
        return {path: script_text(path) for path in self._scripts}

    @cached_property
    def _lines(self) -> list[_Launching]:
        found = [(path, launch_lines(text)) for path, text in self._texts.items()]
        return [
            _Launching(f"{path}:{line.line}" if len(lines) > 1 else str(path), line)
            for path, lines in found
            for line in lines
        ]


def _words(line: LaunchLine) -> list[Word]:
    return [*line.options.values(), *line.arguments]


def _names(one: _Launching, path: Path) -> bool:
    recipe = recipe_named(one.line, one.place.rpartition(":")[0] or one.place)
    return bool(recipe and recipe.refers_to(path)) or any(
        names(word.text.rpartition("=")[2], path) for word in _words(one.line)
    )
