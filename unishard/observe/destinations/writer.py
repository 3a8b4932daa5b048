"""What a destination of `logging.to` supplies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

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
