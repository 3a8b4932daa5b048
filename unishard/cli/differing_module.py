"""Runs again to find the first module that differs, for `unishard compare --same` and `--golden`."""

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
    from unishard.tools.compare.run_comparison import RunComparison


Again = Callable[[Sequence["Variant"], tuple[int, ...]], Iterable["Measured"]]
"""Runs candidates up to the last of these steps, in which each module is measured."""


def with_modules(
    comparisons: Iterable[RunComparison], rows: Sequence[Variant], golden: Path | None, cfg: Config, again: Again
) -> Iterator[RunComparison]:
    """Add the first module that differs to the comparisons of runs that differ.

    Args:
        comparisons: Of each candidate.
        rows: The candidates; without a golden file the first is what the others are compared with.
        golden: The golden file.
        cfg: What runs.
        again: Runs candidates.
    """
    for comparison in comparisons:
        if comparison.at is None or comparison.at.name == "lr":  # no module decides the learning rate
            yield comparison
            continue
        differing = next(row for row in rows if str(row) == comparison.found.name)
        yield comparison._replace(
            located=_located(comparison.at.step, [differing] if golden else [differing, rows[0]], golden, cfg, again)
        )


def _located(last: int, rows: Sequence[Variant], golden: Path | None, cfg: Config, again: Again) -> Located:
    """Measure the step that differs and the one before it, whose gradients decide the weights of the next step."""
    from unishard.contract.tolerances import TOLERANCES
    from unishard.tools.compare.modules import Located, first_module, modules_in

    expected = {} if golden is None else modules_in(golden.read_text(encoding="utf-8", errors="replace"))
    if golden is not None and last not in expected:
        why = f"{golden} has no modules of step {last}, so the first one that differs is not known"
        return Located(
            None,
            (f"{why}; with values that are right, run unishard compare CFG --write-golden {golden} --modules SCRIPT",),
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
    modules = modules_in(measured[0].modules)
    result = first_module(
        modules, expected if golden is not None else modules_in(measured[1].modules), TOLERANCES[cfg.precision.compute]
    )
    if cfg.compile.mode != "none":
        result = result._replace(
            notes=(*result.notes, "modules inside compiled blocks are not seen; add --set compile=none to see them")
        )
    return result
