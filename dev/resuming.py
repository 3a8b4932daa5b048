"""Resumes every kind of run by every other and writes docs/resuming.md: `make matrix`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import product
from pathlib import Path

from dev.pages.markdown import table
from unishard.contract.tolerances import TOLERANCES
from unishard.testing.cells import BACKENDS, STRATEGIES
from unishard.testing.resuming import AFTER, BEFORE, Pair, ResumedRun, Resumption, holds, measure

WORLDS = (1, 2, 4)
"""Numbers of ranks."""
_PRECISIONS = ("fp32", "bf16")


def write(path: Path) -> None:
    """Measure every pair and write the page.

    Raises:
        AssertionError: Some pairs exceed the bounds; the page is written nevertheless.
    """
    results: dict[Pair, Resumption] = {}
    for precision in _PRECISIONS:
        pairs = every_pair(precision)
        for kind in dict.fromkeys((pair.saved.backend, pair.saved.strategy) for pair in pairs):
            results |= measure([pair for pair in pairs if (pair.saved.backend, pair.saved.strategy) == kind])
            sys.stderr.write(f"{precision}, saved by {' '.join(kind)}: {len(results)} pairs\n")
    path.write_text(page(results), encoding="utf-8")
    wrong = [f"{pair}: {resumption}" for pair, resumption in results.items() if not holds(pair, resumption)]
    if wrong:
        raise AssertionError(f"{len(wrong)} of {len(results)}:\n" + "\n".join(wrong))


def every_pair(precision: str) -> list[Pair]:
    """All pairs of strategies, engines and numbers of ranks."""
    runs = [
        ResumedRun(backend, strategy, world, precision)
        for backend, strategy, world in product(BACKENDS, STRATEGIES, WORLDS)
    ]
    return [Pair(*pair) for pair in product(runs, runs)]


def page(results: Mapping[Pair, Resumption]) -> str:
    """The page in Markdown."""
    tables = [f"## {precision}\n\n{_table(precision, results)}" for precision in _PRECISIONS]
    return "\n\n".join([_introduction(results), *tables, "## Beyond the bounds", *_beyond(results)]) + "\n"


def _introduction(results: Mapping[Pair, Resumption]) -> str:
    same = [resumption for pair, resumption in results.items() if pair.saved == pair.resumed]
    torch, deepspeed = (version(package).partition("+")[0] for package in ("torch", "deepspeed"))
    return f"""# Resuming

Each pair is a run that is saved after {BEFORE} updates, and another run that resumes it. It is compared with the first run, not
interrupted, over the {AFTER} updates that follow. There are {len(results)} pairs: every strategy on every engine at
{", ".join(map(str, WORLDS))} ranks, resumed by every other. Written by `make matrix`: torch {torch},
DeepSpeed {deepspeed}, CPU, gloo. The model is a tiny Llama with tied embeddings in two
parameter groups, trained with AdamW, warm-up, a cosine schedule, clipping that acts, and a global batch of 8 samples at any number of
ranks. The checkpoint is in the middle of an epoch, and the resumed model starts from other parameters.

- The same engine, strategy and number of ranks: {sum(resumption.same_bits for resumption in same)} of {len(same)} pairs have bit-equal losses and
  bit-equal final parameters.
- The loaded state, saved again immediately: {sum(resumption.same_state for resumption in results.values())} of {len(results)} pairs have the same hash for
  every tensor of the model and of the optimizer. `load(verify="bits")` compared them before.
- The tables show the largest relative deviation of the first three losses / of all {AFTER} losses, over all pairs of numbers of ranks.
  The engines sum the same gradients in another order, a difference of 1e-7. In bf16 this sometimes rounds a weight to the neighboring
  number, 2^-8 away, as between two runs that are not interrupted ([parity.md](parity.md))."""


def _table(precision: str, results: Mapping[Pair, Resumption]) -> str:
    kinds = list(product(BACKENDS, STRATEGIES))
    rows = ((" ".join(saved), *(_cell(precision, results, saved, resumed) for resumed in kinds)) for saved in kinds)
    return table(("saved by, resumed by", *map(" ".join, kinds)), rows)


def _cell(precision: str, results: Mapping[Pair, Resumption], saved: tuple[str, str], resumed: tuple[str, str]) -> str:
    inside = [
        resumption
        for pair, resumption in results.items()
        if _is(pair.saved, saved, precision) and _is(pair.resumed, resumed, precision)
    ]
    return (
        f"{max(each.first_losses for each in inside):.0e} / {max(each.losses for each in inside):.0e}" if inside else ""
    )


def _is(run: ResumedRun, kind: tuple[str, str], precision: str) -> bool:
    return (run.backend, run.strategy, run.precision) == (*kind, precision)


def _beyond(results: Mapping[Pair, Resumption]) -> Iterator[str]:
    bounds = "; ".join(
        f"{precision}: {TOLERANCES[precision].first_losses:.0e} and {TOLERANCES[precision].losses:.0e}"
        for precision in _PRECISIONS
    )
    beyond = [(pair, resumption) for pair, resumption in results.items() if not holds(pair, resumption)]
    yield (
        f"The bounds for the first three losses and for all of them: {bounds}. {len(beyond)} of {len(results)} pairs "
        "are beyond them."
    )
    if beyond:
        rows = ((str(pair), f"{each.first_losses:.1e}", f"{each.losses:.1e}") for pair, each in beyond)
        yield table(("pair", "first three losses", "all losses"), rows)


def main(arguments: Sequence[str]) -> None:
    """Write the page to a path."""
    parser = argparse.ArgumentParser(description="Measure every pair of runs and write the page.")
    parser.add_argument("path", type=Path)
    write(parser.parse_args(arguments).path)


if __name__ == "__main__":
    main(sys.argv[1:])
