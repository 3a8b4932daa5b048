"""Draws the two curves."""

from __future__ import annotations

import math
from pathlib import Path

from unishard.tools.demo.curves import CurveGap, TrainingCurve

_WIDE, _THIN = "#f4a261", "#1d3557"


def plot(one: TrainingCurve, other: TrainingCurve, path: Path) -> None:
    """Write a PNG: the curves on each other, the first wide and light, the second thin and dark; below, their
    difference.

    Args:
        one: The run that is drawn wide.
        other: The run that is drawn thin, with as many updates.
        path: The PNG file.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), layout="constrained")
    curves, gaps = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    updates = range(1, len(one.losses) + 1)
    curves.plot(updates, one.losses, color=_WIDE, linewidth=7, solid_capstyle="round", label=one.backend)
    curves.plot(updates, other.losses, color=_THIN, linewidth=1.5, label=other.backend)
    curves.set_title(f"A tiny Llama on English text: one script, one config, world size {one.ranks}", loc="left")
    curves.set_ylabel("training loss")
    curves.legend(frameon=False)

    relative = [gap.relative for gap in CurveGap.each(one, other)]
    gaps.bar(updates, relative, color=_THIN, width=0.8)
    gaps.set_ylabel("relative\ndifference")
    gaps.set_xlabel("update")
    gaps.xaxis.get_major_locator().set_params(integer=True)
    gaps.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    gaps.set_ylim(0, 1.25 * max(filter(math.isfinite, relative), default=0) or 1e-7)
    for panel in (curves, gaps):
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#e5e5e5", linewidth=0.8)
        panel.set_axisbelow(True)
    figure.savefig(path, dpi=150)
