"""The table of `unishard compare`, in 80 columns. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap

from unishard.tools.compare.distance import Distance, distance_to
from unishard.tools.compare.measuring import Measured
from unishard.tools.compare.records import Course

_COLUMNS = 80


def distances(rows: Sequence[Measured]) -> list[Distance | None]:
    """How far each row is from the first one that has not failed; None for that one and for failed rows."""
    curves = [None if row.failure else Course.of(row.records) for row in rows]
    first = next((curve for curve in curves if curve is not None), None)
    return [None if curve is None or first is None or curve is first else distance_to(curve, first) for curve in curves]


def lines_of(rows: Sequence[Measured], peak_tflops: float | None = None) -> Iterator[str]:
    """One line for each candidate, what it computes and sends, and what stands out.

    Args:
        rows: What was measured.
        peak_tflops: The device's peak, for MFU.
    """
    unit = "tokens/s" if any(row.median("tokens_per_second") for row in rows) else "samples/s"
    yield f"{'':<25}{'step s':>8}{unit:>10}{'GiB':>7}{'first s':>9}{'loss diff':>10}{'norm diff':>10}"
    for row, distance in zip(rows, distances(rows), strict=True):
        if row.failure is not None:
            yield from wrap(f"{row.candidate!s:<25} failed: {row.failure}", _COLUMNS, subsequent_indent=" " * 4)
            continue
        rate = row.median("tokens_per_second" if unit == "tokens/s" else "samples_per_second")
        loss, norm = (None, None) if distance is None else (distance.loss, distance.norm)
        yield (
            f"{row.candidate!s:<25}{number(row.median('step_seconds'), '.4g'):>8}{number(rate, ',.0f'):>10}"
            f"{number(row.memory_gib, '.2f'):>7}{number(row.first_step, '.1f'):>9}"
            f"{number(loss, '.1e'):>10}{number(norm, '.1e'):>10}"
        )
    run = [row for row in rows if not row.failure]
    yield from _work(run, peak_tflops)
    yield from _remarks(run)


def _work(rows: Sequence[Measured], peak_tflops: float | None) -> Iterator[str]:
    """What is known of floating-point operations and of traffic."""
    cells = [(row, row.median("tflops"), row.mfu(peak_tflops), row.median("sent_gib")) for row in rows]
    if not any(value is not None for _, *values in cells for value in values):
        return
    yield ""
    yield f"{'of one rank':<25}{'TFLOP/s':>10}{'MFU':>8}{'sends GiB':>12}"
    for row, tflops, mfu, sent in cells:
        yield f"{row.candidate!s:<25}{number(tflops, '.3g'):>10}{number(mfu, '.1%'):>8}{number(sent, '.3g'):>12}"
    if any(sent is not None for *_, sent in cells):
        yield "(sends: in a step, by the formulas of unishard plan, not counted)"


def _remarks(rows: Sequence[Measured]) -> Iterator[str]:
    timed = [(seconds, row) for row in rows if (seconds := row.median("step_seconds")) is not None]
    if len(timed) > 1:
        (best, row), (second, _) = sorted(timed, key=lambda entry: entry[0])[:2]
        yield ""
        yield f"fastest: {row.candidate}, {second / best:.2f} x the next one"


def number(value: float | None, form: str) -> str:
    """A number in a form, or a dash."""
    return "-" if value is None else format(value, form)
