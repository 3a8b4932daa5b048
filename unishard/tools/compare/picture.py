"""The picture of `unishard compare`: the losses of all candidates, and how long their steps take."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from io import StringIO

from unishard.errors import BackendError
from unishard.tools.compare.measuring import Measured
from unishard.tools.compare.records import Course

_WIDEST, _THINNEST = 8.0, 1.5


def require_matplotlib() -> None:
    """Raise BackendError where nothing can be drawn; before a comparison, which takes minutes."""
    if find_spec("matplotlib") is None:
        raise BackendError("--picture needs matplotlib; pip install matplotlib, or leave --picture out")


def svg_of(rows: Sequence[Measured]) -> str:
    """An SVG: above the losses, the first candidate widest, so that equal curves are seen; below the median seconds of
    a step.

    Args:
        rows: What was measured; those that failed are left out.
    """
    from matplotlib.figure import Figure

    run = [row for row in rows if not row.failure]
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    losses, seconds = figure.subplots(2, 1, height_ratios=[3, 1 + len(run) / 4])
    for at, row in enumerate(run):
        course = Course.of(row.records)
        width = _WIDEST - (_WIDEST - _THINNEST) * at / max(1, len(run) - 1)
        values = [float("nan") if loss is None else loss for loss in course.losses]
        losses.plot(course.steps, values, linewidth=width, label=str(row.candidate))
        seconds.barh(str(row.candidate), row.median("step_seconds") or 0.0)
    losses.set_xlabel("step")
    losses.set_ylabel("loss")
    if run:
        losses.legend(frameon=False)
    seconds.invert_yaxis()
    seconds.set_xlabel("median seconds of a step")
    drawn = StringIO()
    figure.savefig(drawn, format="svg")
    return drawn.getvalue()
