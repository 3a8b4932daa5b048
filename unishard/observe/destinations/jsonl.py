"""Writes one JSON object per line."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from errno import EINVAL
from itertools import count
from pathlib import Path
from typing import TextIO

from unishard.contract.plan import ObserveSpec
from unishard.errors import ConfigError, Problem
from unishard.observe.destinations.writer import Values

FILE = "log.jsonl"
"""Its name in `logging.dir`."""


class JsonLines:
    """Appends to `log.jsonl`. Each line is written at once, so a killed run loses none, but for half of the last one.

    A new run sets the file of another one aside, as `log-1.jsonl`; a resumed run continues it.
    """

    def __init__(self, spec: ObserveSpec) -> None:
        self._path = Path(spec.logging.dir or ".").absolute() / FILE  # now: the script may change its directory later
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO | None = None

    def write(self, step: int, values: Values) -> None:
        """Append a line; numbers that JSON does not have (infinite, NaN) are null."""
        if self._file is None:
            self._set_aside()
            self._file = self._opened()
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()

    def resume(self, step: int) -> None:
        """Drop the lines of later steps, and a last line that a killed run left incomplete.

        Replaces the file at once.
        """
        self.close()
        if self._path.is_file():
            draft = self._path.with_suffix(".kept")
            with draft.open("w", encoding="utf-8") as file:
                file.writelines(self._lines_up_to(step))
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._path)
        self._file = self._opened()

    def _opened(self) -> TextIO:
        try:
            if self._path.exists() and not self._path.is_file():  # opening a pipe would wait for its reader
                raise OSError(EINVAL, "not a file")
            return self._path.open("a", encoding="utf-8")
        except OSError as error:
            problem = f"cannot be written ({error.strerror}); remove it, or choose another logging.dir"
            raise ConfigError([Problem("logging.dir", problem, str(self._path))]) from error

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _lines_up_to(self, step: int) -> Iterator[str]:
        with self._path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(record, dict) and isinstance(at := record.get("step", 0), int | float) and at <= step:
                    yield f"{line.rstrip()}\n"

    def _set_aside(self) -> None:
        if self._path.is_file():
            places = (self._path.with_stem(f"{self._path.stem}-{number}") for number in count(1))
            self._path.rename(next(place for place in places if not place.exists()))
