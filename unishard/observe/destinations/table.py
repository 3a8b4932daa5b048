"""The destinations of `logging.to`, by name, and what each needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from unishard.config import Logging
from unishard.contract.plan import ObserveSpec
from unishard.errors import ConfigError, Problem

# -- What a destination of `logging.to` supplies ---------------------------------------------------

Values = Mapping[str, float]
"""Numbers by name, such as `loss` and `tokens_per_second`."""


class Writer(Protocol):
    """Writes records on rank 0. A writer may raise: the run goes on without it, with a warning."""

    def write(self, step: int, values: Values) -> None:
        """Write a record.

        Args:
            step: Optimizer steps since the start of the training. The same step may come again, with other names.
            values: Its numbers.
        """

    def resume(self, step: int) -> None:
        """Prepare to go on after this step of an earlier run, or of this one: later ones are written again."""

    def close(self) -> None:
        """Write what is buffered and release the files. Called once."""


# -- Remembers the id of a run of W&B or MLflow in `logging.dir`, so that a resumed training continues it --


class RunFile:
    """A file with one line, the id; no file, and no memory, without `logging.dir`."""

    def __init__(self, directory: str | None, tool: str) -> None:
        self._path = None if directory is None else Path(directory) / f"{tool}-run-id"

    def read(self) -> str | None:
        """The id of the run before; None if there was none."""
        return (
            self._path.read_text(encoding="utf-8").strip() if self._path is not None and self._path.is_file() else None
        )

    def write(self, run_id: str) -> None:
        """Remember an id."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(f"{run_id}\n", encoding="utf-8")


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
