"""The results as one SVG: how long unishard's step takes relative to the others', how much it holds, and its first
step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.peers.page import GOALS, usable

Json = dict[str, Any]
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
