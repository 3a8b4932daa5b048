"""Writes the tables of docs/performance.md from the results of a run. Pure, but for the page itself."""

from __future__ import annotations

import datetime
import math
import os
import platform
import statistics
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.peers.cell import Cell
from unishard.contract.tolerances import TOLERANCES

BEGIN, END = "<!-- peers: written by benchmarks/peers -->", "<!-- end of peers -->"
NOT_RUN = "Not measured yet: `make bench ONLY=peers` writes this section."
GOALS = {"by hand": 1.0, "Accelerate": 0.95}
"""At most so long is a step of unishard, relative to the same step of the other."""
TRAFFIC = 1e-3
"""Relative difference from the plan: a few bytes for the gradient norm and flags."""

Json = dict[str, Any]


def section(results: Json, picture: str | None = None) -> str:
    """The section's text."""
    if not results["cells"]:
        return NOT_RUN
    lines = [about(results["machine"]), "", *goals(results["cells"])]
    if picture:
        lines += ["", f"![Steps of unishard relative to the same training by hand and through Accelerate]({picture})"]
    lines += [
        "",
        "Milliseconds of an optimizer step, and the median of paired ratios with its 95 % interval; of fewer than 6 "
        "pairs the whole range,",
        "which holds the median less often than that:",
        "",
        *times(results["cells"]),
    ]
    lines += [
        "",
        "Collectives of a step, bytes that a rank sends relative to `unishard plan`, and the most MiB that it holds:",
        "",
    ]
    lines += [*traffic(results["cells"])]
    lines += [*void(results["cells"]), *(f"\n{note}" for note in results["notes"])]
    return "\n".join(lines)


def sentence(results: Json) -> str:
    """README's sentence: medians and ranges over the cells, and the cell that is the slowest beside a loop by hand."""
    cells = results["cells"]
    hand, accelerate = (sorted(cell["ratios"][name]["ratio"] for cell in cells if usable(cell, name)) for name in GOALS)
    slowest = next(cell for cell in cells if usable(cell, "by hand") and cell["ratios"]["by hand"]["ratio"] == hand[-1])
    spent = slowest["candidates"]["unishard"]["seconds"] * 1e3
    return textwrap.fill(
        f"On {results['machine']['ranks']} CPU ranks a step takes {middle(hand):.2f} times as long as that of a loop "
        f"by hand (median of {len(hand)} cells; {hand[0]:.2f} to {hand[-1]:.2f}, the most for steps of {spent:.0f} ms "
        f"with `{slowest['engine']}` and `{slowest['strategy']}`) and {middle(accelerate):.2f} times as long as "
        f"Accelerate's ({accelerate[0]:.2f} to {accelerate[-1]:.2f}).",
        88,
    )


def about(machine: Json) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    cores, load = machine["cores"], machine["load"]
    return (
        f"Measured on {machine['date']}: {machine['ranks']} ranks on {cores} cores ({machine['cpu']}, "
        f"{machine['system']}), gloo, one thread a rank, load {load} before; Python {machine['python']}, {versions}."
    )


def goals(cells: list[Json]) -> Iterator[str]:
    """In how many cells each goal is reached."""
    for name, goal in GOALS.items():
        found = [cell["ratios"][name] for cell in cells if usable(cell, name)]
        if found:
            met, sure = sum(each["ratio"] <= goal for each in found), sum(each["low"] > goal for each in found)
            yield (
                f"- A step takes at most {goal:.2f} x that of {name} in {met} of {len(found)} cells; in {sure} the "
                f"whole interval is above. Median of the cells: {middle([each['ratio'] for each in found]):.3f}."
            )
    exact = sum(abs(of(cell, "unishard") - 1) <= TRAFFIC for cell in cells)
    yield f"- unishard sends the bytes of the plan (to {TRAFFIC:.1%}) in {exact} of {len(cells)} cells."


def times(cells: list[Json]) -> Iterator[str]:
    yield (
        "| engine | strategy | precision | model | by hand | Accelerate | unishard | unishard / by hand | unishard / "
        "Accelerate | pairs |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for cell in cells:
        spent = [each(cell, name, lambda side: f"{side['seconds'] * 1e3:.1f}") for name in (*GOALS, "unishard")]
        ratios = [ratio(cell, name) for name in GOALS]
        yield row(cell, *spent, *ratios, str(max(found["pairs"] for found in cell["ratios"].values())))


def traffic(cells: list[Json]) -> Iterator[str]:
    yield "| engine | strategy | precision | model | plan, MB | by hand | Accelerate | unishard |"
    yield "|---|---|---|---|---|---|---|---|"
    for cell in cells:

        def said(side: Json, cell: Json = cell) -> str:
            return f"{side['collectives']}; {side['nbytes'] / cell['theory']:.3f} x; {side['peak'] / 2**20:.1f} MiB"

        yield row(cell, f"{cell['theory'] / 1e6:.3f}", *(each(cell, name, said) for name in (*GOALS, "unishard")))


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
    if not usable(cell, name):
        return ""
    found = cell["ratios"][name]
    return f"{found['ratio']:.3f} ({found['low']:.3f} to {found['high']:.3f})"


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


def middle(values: list[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def names(cell: Json) -> str:
    return " ".join(cell[name] for name in ("engine", "strategy", "precision", "model"))


def row(cell: Json, *values: str) -> str:
    return (
        "| " + " | ".join([cell["engine"], f"`{cell['strategy']}`", cell["precision"], cell["model"], *values]) + " |"
    )


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
    labels = [" ".join(cell[name] for name in ("engine", "strategy", "precision", "model")) for cell in cells]
    panels[0].set_yticks(range(len(cells)), labels, fontsize=8)
    figure.suptitle("Lower is better; dashed: the goal; bars: 95 % interval, of few pairs the range", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


# --------------------------------------------------------------------------------------------------
# From what ranks gave to what the page says: medians of paired ratios, whether all trained the same, machine, versions
# and date. Pure.


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Json:
    """The median of the ratios of steps of the same round, with its 95 % interval (order statistics, no distribution
    assumed).
    """
    ratios = sorted(own / other for own, other in zip(ours, theirs, strict=True))
    margin = 1.96 * math.sqrt(len(ratios)) / 2
    low, high = (ratios[min(len(ratios) - 1, max(0, round(len(ratios) / 2 + sign * margin)))] for sign in (-1, 1))
    return {"ratio": statistics.median(ratios), "low": low, "high": high, "pairs": len(ratios)}


def deviation(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference of two curves; infinite where a loss is not finite."""
    apart = [abs(own - other) / abs(other) for own, other in zip(losses, reference, strict=True)]
    return max(each if math.isfinite(each) else math.inf for each in apart)


def cell_result(cell: Cell, parameters: int, theory: int, ranks: Sequence[Mapping[str, Any]]) -> Json:
    """One cell from the answers of its ranks: candidates by name, each with its steps, losses, counts and memory."""
    bound, first = TOLERANCES[cell.precision].losses, ranks[0]
    reference = next(iter(first))
    sides: Json = {}
    for name, side in first.items():
        far = max(deviation(rank[name].losses, rank[reference].losses) for rank in ranks)
        sides[name] = {
            "seconds": statistics.median(side.seconds),
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


def machine(world: int) -> Json:
    """Where and with what it was measured."""
    packages = ("torch", "deepspeed", "accelerate", "transformers", "unishard")
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
        "ranks": world,
        "load": round(os.getloadavg()[0], 2),
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or "CPU")
