"""Writes the tables of docs/performance.md from the results of a run. Pure, but for the page itself."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import about
from benchmarks.peers.cell import Cell
from benchmarks.ratios import paired, ranged
from dev.measured import Json, Measured
from dev.pages.markdown import table
from dev.ranks.judging import deviation
from unishard.contract.tolerances import TOLERANCES

GOALS = {"by hand": 1.0, "Accelerate": 0.95}
"""At most so long is a step of unishard, relative to the same step of the other."""
TRAFFIC = 1e-3
"""Relative difference from the plan: a few bytes for the gradient norm and flags."""
PICTURE = "peers.svg"
"""Beside the page."""
_CELL = ("engine", "strategy", "precision", "model")


def cell_result(cell: Cell, parameters: int, theory: int, ranks: Sequence[Mapping[str, Any]]) -> Json:
    """One cell from the answers of its ranks: candidates by name, each with its steps, losses, counts and memory."""
    bound, first = TOLERANCES[cell.precision].losses, ranks[0]
    reference = next(iter(first))
    sides: Json = {}
    for name, side in first.items():
        far = max(deviation(rank[name].losses, rank[reference].losses) for rank in ranks)
        sides[name] = {
            "seconds": median(side.seconds),
            "deviation": far,
            "void": not far <= bound,
            "collectives": side.counts.collectives,
            "nbytes": side.counts.nbytes,
            "peak": max(rank[name].held + rank[name].counts.peak for rank in ranks),
        }
    ratios = (
        {name: paired(first["unishard"].seconds, first[name].seconds) for name in first if name != "unishard"}
        if "unishard" in first
        else {}
    )
    return {
        **cell._asdict(),
        "parameters": parameters,
        "tokens": cell.size.batch * cell.size.length * cell.size.accumulation,
        "steps": len(first[reference].losses),
        "bound": bound,
        "theory": theory,
        "candidates": sides,
        "ratios": ratios,
    }


def section(results: Json) -> str:
    """The section's text."""
    lines = [about(results["machine"]), "", *goals(results["cells"]), ""]
    lines += [f"![Steps of unishard relative to the same training by hand and through Accelerate]({PICTURE})"]
    lines += [
        "",
        "Milliseconds of an optimizer step, and the median of paired ratios with its 95 % interval; of fewer than 6 "
        "pairs the whole range,",
        "which holds the median less often than that:",
        "",
        times(results["cells"]),
    ]
    lines += [
        "",
        "Collectives of a step, bytes that a rank sends relative to `unishard plan`, and the most MiB that it holds:",
        "",
    ]
    lines += [traffic(results["cells"]), *void(results["cells"]), *(f"\n{note}" for note in results["notes"])]
    return "\n".join(lines)


def sentence(results: Json) -> str:
    """README's sentence: medians and ranges over the cells, and the cell that is the slowest beside a loop by hand."""
    cells = results["cells"]
    hand, accelerate = (sorted(cell["ratios"][name]["ratio"] for cell in cells if usable(cell, name)) for name in GOALS)
    slowest = next(cell for cell in cells if usable(cell, "by hand") and cell["ratios"]["by hand"]["ratio"] == hand[-1])
    spent = slowest["candidates"]["unishard"]["seconds"] * 1e3
    return textwrap.fill(
        f"On {results['machine']['ranks']} CPU ranks a step takes {median(hand):.2f} times as long as that of a loop "
        f"by hand (median of {len(hand)} cells; {hand[0]:.2f} to {hand[-1]:.2f}, the most for steps of {spent:.0f} ms "
        f"with `{slowest['engine']}` and `{slowest['strategy']}`) and {median(accelerate):.2f} times as long as "
        f"Accelerate's ({accelerate[0]:.2f} to {accelerate[-1]:.2f}).",
        88,
    )


def goals(cells: list[Json]) -> Iterator[str]:
    """In how many cells each goal is reached."""
    for name, goal in GOALS.items():
        found = [cell["ratios"][name] for cell in cells if usable(cell, name)]
        if found:
            met, sure = sum(each["ratio"] <= goal for each in found), sum(each["low"] > goal for each in found)
            yield (
                f"- A step takes at most {goal:.2f} x that of {name} in {met} of {len(found)} cells; in {sure} the "
                f"whole interval is above. Median of the cells: {median([each['ratio'] for each in found]):.3f}."
            )
    exact = sum(abs(of(cell, "unishard") - 1) <= TRAFFIC for cell in cells)
    yield f"- unishard sends the bytes of the plan (to {TRAFFIC:.1%}) in {exact} of {len(cells)} cells."


def times(cells: list[Json]) -> str:
    columns = ("by hand", "Accelerate", "unishard", "unishard / by hand", "unishard / Accelerate", "pairs")
    return table((*_CELL, *columns), map(_times, cells))


def _times(cell: Json) -> tuple[str, ...]:
    spent = [each(cell, name, lambda side: f"{side['seconds'] * 1e3:.1f}") for name in (*GOALS, "unishard")]
    pairs = max(found["pairs"] for found in cell["ratios"].values())
    return *_place(cell), *spent, *(ratio(cell, name) for name in GOALS), str(pairs)


def traffic(cells: list[Json]) -> str:
    return table((*_CELL, "plan, MB", "by hand", "Accelerate", "unishard"), map(_traffic, cells))


def _traffic(cell: Json) -> tuple[str, ...]:
    def said(side: Json) -> str:
        return f"{side['collectives']}; {side['nbytes'] / cell['theory']:.3f} x; {side['peak'] / 2**20:.1f} MiB"

    return *_place(cell), f"{cell['theory'] / 1e6:.3f}", *(each(cell, name, said) for name in (*GOALS, "unishard"))


def void(cells: list[Json]) -> Iterator[str]:
    """What is not compared, and how far the rest is apart."""
    apart = max(
        (side["deviation"] for cell in cells for side in cell["candidates"].values() if not side["void"]), default=0.0
    )
    yield f"\nThe losses of all loops of a cell agree to {apart:.1e} over all steps, unless said here."
    for cell in cells:
        for name, side in cell["candidates"].items():
            if side["void"]:
                yield (
                    f"\n**Void**: {name} of {names(cell)} trains something else than by hand: its losses are "
                    f"{side['deviation']:.1e} apart, at most {cell['bound']:.0e}."
                )


def line_of(cell: Json) -> str:
    """For the terminal."""
    said = [
        f"{name} {side['seconds'] * 1e3:.1f} ms" + (" VOID" if side["void"] else "")
        for name, side in cell["candidates"].items()
    ]
    ratios = [f"/ {name} {ratio(cell, name)}" for name in cell["ratios"]]
    sent = [f"{name} {of(cell, name):.3f}" for name in cell["candidates"]]
    return f"{names(cell)}: {', '.join(said)}; unishard {', '.join(ratios)}; bytes / plan: {', '.join(sent)}"


def ratio(cell: Json, name: str) -> str:
    return ranged(cell["ratios"][name], 3) if usable(cell, name) else ""


def usable(cell: Json, name: str) -> bool:
    """Whether both sides train the same."""
    return (
        name in cell["ratios"] and not cell["candidates"][name]["void"] and not cell["candidates"]["unishard"]["void"]
    )


def of(cell: Json, name: str) -> float:
    """Bytes relative to the plan's."""
    return float(cell["candidates"][name]["nbytes"] / cell["theory"])


def each(cell: Json, name: str, said: Callable[[Json], str]) -> str:
    return said(cell["candidates"][name]) if name in cell["candidates"] else ""


def names(cell: Json) -> str:
    return " ".join(cell[name] for name in _CELL)


def _place(cell: Json) -> tuple[str, ...]:
    return cell["engine"], f"`{cell['strategy']}`", cell["precision"], cell["model"]


# The results as one SVG: how long unishard's step takes relative to the others', and how much it holds.

_COLORS = {"fsdp": "C0", "deepspeed": "C1"}


def draw(results: Json, path: Path) -> None:
    """Write the SVG; the same bytes for the same results."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "unishard"
    from matplotlib import pyplot

    cells = results["cells"][::-1]
    titles = [f"step: unishard / {name}" for name in GOALS] + ["peak memory: unishard / by hand"]
    figure, panels = pyplot.subplots(1, 3, figsize=(11, 1.4 + 0.24 * len(cells)), sharey=True)
    for panel, name in zip(panels[:2], GOALS, strict=True):
        for at, cell in enumerate(cells):
            if usable(cell, name):
                found = cell["ratios"][name]
                spread = [[found["ratio"] - found["low"]], [found["high"] - found["ratio"]]]
                panel.errorbar(found["ratio"], at, xerr=spread, fmt="o", markersize=4, color=_COLORS[cell["engine"]])
        panel.axvline(GOALS[name], color="0.3", linestyle="--", linewidth=1)
    for at, cell in enumerate(cells):
        peak = cell["candidates"]["unishard"]["peak"] / cell["candidates"]["by hand"]["peak"]
        panels[2].plot(peak, at, "o", markersize=4, color=_COLORS[cell["engine"]])
    panels[2].axvline(1.0, color="0.3", linestyle="--", linewidth=1)
    for panel, title in zip(panels, titles, strict=True):
        panel.set_title(title, fontsize=9)
        panel.grid(alpha=0.3)
        panel.tick_params(labelsize=8)
    panels[0].set_yticks(range(len(cells)), [*map(names, cells)], fontsize=8)
    figure.suptitle("Lower is better; dashed: the goal; bars: 95 % interval, of few pairs the range", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


MEASURED = Measured("peers", "benchmarks/peers/measured.json", {"docs/performance.md": section, "README.md": sentence})
