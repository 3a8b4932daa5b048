"""Remembers the id of a run of W&B or MLflow in `logging.dir`, so that a resumed training continues it."""

from __future__ import annotations

from pathlib import Path


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
