"""Runs again to find the first module that differs, for `unishard parity`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unishard.cli.wrapping import echo
from unishard.config import Config

if TYPE_CHECKING:
    from unishard.tools.compare.candidates import Variant
    from unishard.tools.compare.measuring import Measured
    from unishard.tools.compare.modules import Located
    from unishard.tools.compare.verdict import Verdict


Again = Callable[[Sequence["Variant"], tuple[int, ...]], Iterable["Measured"]]
"""Runs candidates up to the last of these steps, in which each module is measured."""


def with_modules(
    verdicts: Iterable[Verdict], rows: Sequence[Variant], golden: Path | None, cfg: Config, again: Again
) -> Iterator[Verdict]:
    """Add the first module that differs to the verdicts of runs that differ.

    Args:
        verdicts: Of each candidate.
        rows: The candidates; without a golden file the first is what the others are compared with.
        golden: The golden file.
        cfg: What runs.
        again: Runs candidates.
    """
    for verdict in verdicts:
        if verdict.at is None or verdict.at.name == "lr":  # no module decides the learning rate
            yield verdict
            continue
        own = next(row for row in rows if str(row) == verdict.found.name)
        yield verdict._replace(
            located=_located(verdict.at.step, [own] if golden else [own, rows[0]], golden, cfg, again)
        )


def _located(last: int, rows: Sequence[Variant], golden: Path | None, cfg: Config, again: Again) -> Located:
    """Measure the step that differs, and the one before: what its gradients decide is seen only in the next one."""
    from unishard.contract.tolerances import TOLERANCES
    from unishard.tools.compare.modules import Located, first_module, modules_in

    expected = {} if golden is None else modules_in(golden.read_text(encoding="utf-8", errors="replace"))
    if golden is not None and last not in expected:
        what = f"{golden} has no modules of step {last}, so the first one that differs is not known"
        return Located(
            None,
            (f"{what}; with values that are right, run unishard parity CFG --write-golden {golden} --modules SCRIPT",),
        )
    steps = tuple(step for step in (last - 1, last) if step > 0 and (golden is None or step in expected))
    echo(f"measuring the modules in step {' and '.join(map(str, steps))}", err=True)
    measured = list(again(rows, steps))
    for row in measured:
        if row.failure or not row.modules:
            why = row.failure or "nothing was written"
            return Located(
                None,
                (f"the first module that differs is not known: {row.candidate}, run again to measure them: {why}",),
            )
    found = modules_in(measured[0].modules)
    result = first_module(
        found, expected if golden is not None else modules_in(measured[1].modules), TOLERANCES[cfg.precision.compute]
    )
    if cfg.compile.mode != "none":
        result = result._replace(
            notes=(*result.notes, "modules inside compiled blocks are not seen; add --set compile=none to see them")
        )
    return result
