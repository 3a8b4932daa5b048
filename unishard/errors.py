"""Every error that unishard raises on purpose.

    UnishardError
    ├── ConfigError           a config file, or a value in it
    │   └── TranslationError  a valid value that the chosen backend cannot honour
    ├── BackendError          no such backend, not installed, or offered twice
    ├── ModelError            a model that cannot be prepared as asked
    ├── DataError             a dataset that cannot be divided between the ranks as asked
    ├── ContractError         the training loop calls the engine out of order
    ├── RankMismatchError     ranks that should agree do not
    ├── CheckpointError       a checkpoint that cannot be written, is damaged, or does not fit what runs
    ├── NonFiniteError        a gradient is infinite or not a number, and ``training.nonfinite`` is ``raise``
    └── EngineMismatchError   what runs after ``prepare`` is not what was asked

Each message says where, what, and what instead. The command line prints it alone, without a traceback.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "BackendError",
    "CheckpointError",
    "ConfigError",
    "ContractError",
    "DataError",
    "EngineMismatchError",
    "ModelError",
    "NonFiniteError",
    "Problem",
    "RankMismatchError",
    "TranslationError",
    "UnishardError",
]


class UnishardError(Exception):
    """Base of all errors that unishard raises on purpose."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a config: where, what, and what instead."""

    path: str
    """Dotted path of the field, such as ``sharding.strategy``; empty when it is the whole file."""
    what: str
    """What is wrong, and after a semicolon what to write instead."""
    where: str = ""
    """``file:line``, empty when the config did not come from a file."""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.path, self.what) if part)


class ConfigError(UnishardError, ValueError):
    """A config file, or values in it, cannot be used. Lists every problem found, one a line."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


class TranslationError(ConfigError):
    """The config is valid, but the chosen backend cannot honour it."""


class BackendError(UnishardError):
    """The backend is unknown, not installed, or offered by two distributions."""


class ModelError(UnishardError, ValueError):
    """The model cannot be prepared as asked."""


class DataError(UnishardError, ValueError):
    """The dataset cannot be divided between the ranks as asked."""


class ContractError(UnishardError, RuntimeError):
    """The training loop calls the engine in an order, or with a loss, that has no meaning."""


class RankMismatchError(UnishardError, RuntimeError):
    """Ranks that should hold the same config or model do not."""


class CheckpointError(UnishardError, RuntimeError):
    """A checkpoint cannot be written, is incomplete or damaged, or does not fit the model and the optimizer that run."""


class NonFiniteError(UnishardError, ArithmeticError):
    """The gradients of an update are not finite, and ``training.nonfinite`` is ``raise``. Nothing was updated."""


class EngineMismatchError(UnishardError, RuntimeError):
    """What runs after ``prepare`` is not what the config asks for."""
