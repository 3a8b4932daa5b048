"""The destinations of `logging.to`, by name, and what each needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from unishard.config import Logging
from unishard.contract.plan import ObserveSpec
from unishard.errors import ConfigError, Problem
from unishard.observe.destinations.writer import Writer


class Destination(NamedTuple):
    """One row."""

    factory: str
    """`module:function`; the function takes an `ObserveSpec` and returns a `Writer`."""
    package: str = ""
    """The package that it needs; unishard's extra has the same name. Empty if it needs none."""


WRITERS: Mapping[str, Destination] = {
    "progress": Destination("unishard.observe.destinations.progress:ProgressLine"),
    "jsonl": Destination("unishard.observe.destinations.jsonl:JsonLines"),
    "tensorboard": Destination("unishard.observe.destinations.tensorboard:TensorBoard", "tensorboard"),
    "wandb": Destination("unishard.observe.destinations.wandb:Wandb", "wandb"),
    "mlflow": Destination("unishard.observe.destinations.mlflow:MLflow", "mlflow"),
}
"""By the word in `logging.to`."""


def require_installed(asked: Logging) -> None:
    """Check that the packages of the destinations are installed.

    Raises:
        ConfigError: One is not. Lists all of them.
    """
    problems = list(_missing(asked))
    if problems:
        raise ConfigError(problems)


def open_writer(name: str, spec: ObserveSpec) -> Writer:
    """Import a destination and start it."""
    module, _, function = WRITERS[name].factory.partition(":")
    factory: Callable[[Any], Writer] = getattr(import_module(module), function)
    return factory(spec)


def _missing(asked: Logging) -> Iterator[Problem]:
    for name in asked.to:
        package = WRITERS[name].package
        if package and find_spec(package) is None:
            yield Problem(
                "logging.to", f"{name} needs the package {package}; pip install 'unishard[{package}]', or remove {name}"
            )
