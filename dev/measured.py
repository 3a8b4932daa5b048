"""What a program has measured: kept as JSON, and shown in its part of the pages that say it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dev.pages import marked

__all__ = ["ROOT", "Json", "Measured"]

ROOT = Path(__file__).resolve().parents[1]
Json = dict[str, Any]


class Measured(NamedTuple):
    """The results of one program."""

    name: str
    """Of the parts of pages that show them."""
    file: str
    """Where they are kept, in the checkout."""
    shown: Mapping[str, Callable[[Json], str]]
    """By page, what its part says."""

    def kept(self) -> Json:
        """The results of the last run."""
        found: Json = json.loads((ROOT / self.file).read_text(encoding="utf-8"))
        return found

    def keep(self, results: Json) -> None:
        """Keep the results of a run, and write them into the pages."""
        (ROOT / self.file).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        for page, text in self.shown.items():
            marked.write(ROOT / page, self.name, text(results))

    def stale(self) -> list[str]:
        """The pages that say something else than what is kept."""
        return [page for page, text in self.shown.items() if marked.part(ROOT / page, self.name) != text(self.kept())]

    def run(self, parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace], Json | None]) -> bool:
        """Be the program: measure what the command line asks for, and with `--write` keep and show it.

        Args:
            parser: Knows the program's own arguments.
            measure: Gives the results; None if they are not to be kept.

        Returns:
            Whether it has written the pages.
        """
        pages = ", ".join(self.shown)
        parser.add_argument("--write", action="store_true", help=f"keep the results in {self.file}; write {pages}")
        parser.add_argument("--kept", action="store_true", help=f"measure nothing: write {pages} from what is kept")
        given = parser.parse_args()
        results = self.kept() if given.kept else measure(given)
        if results is None or not (given.kept or given.write):
            return False
        self.keep(results)
        return True
