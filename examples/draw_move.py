"""Draws the losses of a run that moved over those of the run that did not, and says how far apart they are.

    python examples/draw_move.py move-out/stayed.jsonl move-out/moved.jsonl move-out/resuming.png

The files are those that move_between_engines.py writes.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from matplotlib.figure import Figure

WIDE, THIN, MARK = "#f4a261", "#1d3557", "#8d99ae"


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Draw the losses of a run that moved over those of the run that did not."
    )
    parser.add_argument("stayed", type=Path, help="JSON lines of the uninterrupted run")
    parser.add_argument("moved", type=Path, help="JSON lines of the run that moved")
    parser.add_argument("picture", type=Path, help="PNG file to write")
    args = parser.parse_args()
    stayed, moved = read(args.stayed), read(args.moved)
    if len(stayed) != len(moved):
        raise SystemExit(
            f"{args.stayed} has {len(stayed)} updates and {args.moved} has {len(moved)}; they must have as many"
        )
    gaps = differences(stayed, moved)
    draw(stayed, moved, gaps, args.picture)
    largest = max(gaps, key=lambda gap: math.inf if math.isnan(gap) else gap)
    print(
        f"largest relative difference of the losses: {largest:.1e}, at update {gaps.index(largest) + 1} of "
        f"{len(gaps)}; {args.picture}"
    )


def read(path: Path) -> list[dict]:
    try:
        log = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path}: {error}") from None
    if not log:
        raise SystemExit(f"{path} is empty; let move_between_engines.py write it, with --out")
    return log


def losses(log: list[dict]) -> list[float]:
    return [line["loss"] for line in log]


def differences(stayed: list[dict], moved: list[dict]) -> list[float]:
    """Of each update, relative to the loss of the uninterrupted run."""
    return [abs(other - one) / abs(one) for one, other in zip(losses(stayed), losses(moved), strict=True)]


def legs(log: list[dict]) -> list[tuple[int, str]]:
    """After how many updates each part of a run began, and what trained it."""
    runs = [line["run"] for line in log]
    return [(at, run) for at, run in enumerate(runs) if at == 0 or run != runs[at - 1]]


def draw(stayed: list[dict], moved: list[dict], gaps: list[float], path: Path) -> None:
    """Write a PNG: the curves on each other, and lines where the run moved; below, the relative difference."""
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    curves, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    updates = range(1, len(moved) + 1)
    curves.plot(
        updates,
        losses(stayed),
        color=WIDE,
        linewidth=7,
        solid_capstyle="round",
        label=f"never moved: {stayed[0]['run']}",
    )
    curves.plot(updates, losses(moved), color=THIN, linewidth=1.5, label="moved, as named above")
    curves.set_title("A tiny Llama on English text: one training, moved between engines", loc="left", pad=36)
    curves.set_ylabel("training loss")
    curves.legend(facecolor="white", framealpha=1, edgecolor="none")

    bottom = 1e-8
    below.vlines(updates, bottom, gaps, color=THIN, linewidth=3)
    below.set_yscale("log")
    below.set_ylim(bottom, 10 * max(1e-7, *filter(math.isfinite, gaps)))
    below.set_ylabel("relative\ndifference")
    below.set_xlabel("update")
    below.text(
        0.01, 0.92, "no bar: the same loss to the bit", transform=below.transAxes, color=MARK, verticalalignment="top"
    )

    for start, run in legs(moved):
        place = {"transform": curves.get_xaxis_transform(), "verticalalignment": "bottom"}
        curves.text(start + 1, 1.01, run.replace(" ", "\n", 1), color=THIN, **place)
        for panel in (curves, below) if start else ():
            panel.axvline(start + 0.5, color=MARK, linestyle="--", linewidth=1)
    for panel in (curves, below):
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#e5e5e5", linewidth=0.8)
        panel.set_axisbelow(True)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
