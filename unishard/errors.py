"""All exceptions of unishard.

    UnishardError
    ├── ConfigError           a config file, or a value in it
    │   └── TranslationError  a valid value that the chosen backend does not support
    ├── BackendError          an unknown backend, not installed, or provided twice
    ├── ModelError            a model that cannot be prepared as asked
    ├── DataError             a dataset that cannot be sharded across ranks as asked
    ├── ContractError         the training loop calls the engine out of order
    ├── RankMismatchError     ranks with different configs, models or calls
    ├── CheckpointError       a checkpoint that cannot be written, is damaged, or does not match the model
    ├── NonFiniteError        a gradient is infinite or NaN, and ``training.nonfinite`` is ``raise``
    └── EngineMismatchError   the running engine does not have the settings of the config

and two warnings:

    RenamedFieldWarning (FutureWarning)    a config uses the old name of a field
    UnusedFieldWarning (UserWarning)       an override leaves a field of the file without a use

Each message says what is wrong, where, and what to do. The command line prints only the message, without a traceback.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
"""Control characters of both sets except tab and line feed, what reverses or breaks lines, and what is no character."""
_CONTROL, _BREAK = re.compile(f"[{_CONTROLS}]"), re.compile(f"[\n\t{_CONTROLS}]")

_MOST = 100
"""Problems in one message."""
_LONGEST = 2000
"""Characters of a problem, which may quote a value from a file."""


class UnishardError(Exception):
    """Base of all exceptions of unishard. Control characters in a message, which may be from a file, are escaped."""

    def __str__(self) -> str:
        return printable(super().__str__())


class Problem(NamedTuple):
    """One problem with a config: where, what, and what to write instead."""

    path: str
    """Dotted path of the field, such as ``sharding.strategy``; empty if it concerns the entire file."""
    what: str
    """What is wrong, and after a semicolon what to write instead."""
    where: str = ""
    """``file:line``, empty when the config did not come from a file."""

    def __str__(self) -> str:
        return ": ".join(part for part in (in_one_line(self.where), in_one_line(self.path), self.what) if part)


def in_parts(reason: str) -> tuple[str, str]:
    """What is wrong, and what to write instead, which every reason has after its first semicolon; empty without one."""
    what, _, instead = reason.partition("; ")
    return what, instead


class ConfigError(UnishardError, ValueError):
    """A config file, or values in it, cannot be used. Lists every problem, one per line."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        lines = [shortened(str(problem), _LONGEST) for problem in self.problems[:_MOST]]
        more = [f"... and {len(self.problems) - _MOST} problems more"] if self.problems[_MOST:] else []
        super().__init__("\n".join([*lines, *more]))


class TranslationError(ConfigError):
    """The config is valid, but the chosen backend does not support it."""


class BackendError(UnishardError):
    """The backend is unknown, not installed, or provided by two distributions."""


class ModelError(UnishardError, ValueError):
    """The model cannot be prepared as asked."""


class DataError(UnishardError, ValueError):
    """The dataset cannot be sharded across ranks as asked."""


class ContractError(UnishardError, RuntimeError):
    """The training loop calls the engine in the wrong order, or with an invalid loss."""


class RankMismatchError(UnishardError, RuntimeError):
    """Ranks have different configs or models, or make different calls."""


class CheckpointError(UnishardError, RuntimeError):
    """A checkpoint cannot be written, is incomplete or damaged, or does not match the model and the optimizer."""


class NonFiniteError(UnishardError, ArithmeticError):
    """The gradients of an optimizer step are not finite, and ``training.nonfinite`` is ``raise``.

    Nothing was updated.
    """


class EngineMismatchError(UnishardError, RuntimeError):
    """The running engine does not have the settings of the config."""


class RenamedFieldWarning(FutureWarning):
    """A config uses the old name of a field. The old name is accepted for one release."""


class UnusedFieldWarning(UserWarning):
    """An override leaves a field of the file without a use."""


def printable(text: str) -> str:
    """Write control characters as the escapes of JSON and YAML; lines stay lines."""
    return _CONTROL.sub(_escaped, text)


def in_one_line(text: str) -> str:
    """The same for a name, in which line feeds and tabs are escaped too: it can begin no line of its own."""
    return _BREAK.sub(_escaped, text)


def shortened(text: str, longest: int) -> str:
    """Leave out the middle of a text that has more characters: its end often says what to write instead."""
    side = longest // 2
    return text if len(text) <= longest else f"{text[:side]} ... ({len(text)} characters) ... {text[-side:]}"


def _escaped(found: re.Match[str]) -> str:
    return {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(found[0], f"\\u{ord(found[0]):04x}")
