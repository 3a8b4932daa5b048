"""A comparison as one HTML page with pictures and without anything from elsewhere. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from textwrap import wrap

from unishard.tools.compare.measuring import Measured
from unishard.tools.compare.records import Course, Distance, distance_to

# -- The table of `unishard compare`, in 80 columns ------------------------------------------------

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
    for row, found in zip(rows, distances(rows), strict=True):
        if row.failure is not None:
            yield from wrap(f"{row.candidate!s:<25} failed: {row.failure}", _COLUMNS, subsequent_indent=" " * 4)
            continue
        rate = row.median("tokens_per_second" if unit == "tokens/s" else "samples_per_second")
        loss, norm = (None, None) if found is None else (found.loss, found.norm)
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
        (best, row), (second, _) = sorted(timed, key=lambda found: found[0])[:2]
        yield ""
        yield f"fastest: {row.candidate}, {second / best:.2f} x the next one"


def number(value: float | None, form: str) -> str:
    """A number in a form, or a dash."""
    return "-" if value is None else format(value, form)


_COLORS = ("#4878a8", "#d9822b", "#5f9e5f", "#8a6fb0", "#b0413e", "#6fa8dc", "#999999", "#c9a227")
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#222;background:#fff}
table{border-collapse:collapse}td,th{padding:.2em .7em;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child,td.text{text-align:left}tr.best{font-weight:bold}td.text{color:#b00020}
svg{max-width:100%;font:12px system-ui,sans-serif}pre{background:#f6f6f6;padding:1em;overflow:auto}
"""
_WIDTH, _BAR, _LABEL = 720, 22, 240
_HIGH = 240


def page_of(rows: Sequence[Measured], title: str, peak_tflops: float | None = None) -> str:
    """The page.

    Args:
        rows: What was measured.
        title: Its heading.
        peak_tflops: The device's peak, for MFU.
    """
    return "\n".join(_page(rows, title, peak_tflops)) + "\n"


def _page(rows: Sequence[Measured], title: str, peak_tflops: float | None) -> Iterator[str]:
    yield "<!doctype html>"
    yield (
        '<html lang="en"><head><meta '
        f'charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style></head><body>'
    )
    yield f"<h1>{escape(title)}</h1>"
    yield from _table(rows, distances(rows), peak_tflops)
    run = [row for row in rows if not row.failure]
    if run:
        yield "<h2>Seconds of a step</h2>"
        yield from _bars(run)
        yield "<h2>Loss</h2>"
        yield from _curves(run)
    yield f"<h2>As text</h2><pre>{escape(chr(10).join(lines_of(rows, peak_tflops)))}</pre></body></html>"


def _table(rows: Sequence[Measured], far: Sequence[Distance | None], peak_tflops: float | None) -> Iterator[str]:
    heads = [
        "",
        "step s",
        "tokens/s",
        "samples/s",
        "TFLOP/s",
        "MFU",
        "memory GiB",
        "sent GiB",
        "first step s",
        "loss diff",
        "norm diff",
    ]
    yield "<table><tr>" + "".join(f"<th>{name}</th>" for name in heads) + "</tr>"
    best = min((seconds for row in rows if (seconds := row.median("step_seconds")) is not None), default=None)
    for row, distance in zip(rows, far, strict=True):
        name = escape(str(row.candidate))
        if row.failure:
            yield (
                f'<tr><td>{name}</td><td class="text" colspan="{len(heads) - 1}">failed: '
                f"{escape(row.failure)}</td></tr>"
            )
            continue
        seconds = row.median("step_seconds")
        cells = [
            name,
            number(seconds, ".4g"),
            number(row.median("tokens_per_second"), ",.0f"),
            number(row.median("samples_per_second"), ",.0f"),
            number(row.median("tflops"), ".3g"),
            number(row.mfu(peak_tflops), ".1%"),
            number(row.memory_gib, ".2f"),
            number(row.median("sent_gib"), ".3g"),
            number(row.first_step, ".1f"),
            number(None if distance is None else distance.loss, ".1e"),
            number(None if distance is None else distance.norm, ".1e"),
        ]
        own = ' class="best"' if seconds is not None and seconds == best else ""
        yield f"<tr{own}>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    yield (
        "</table><p>sent: what one rank sends in a step by the formulas of <code>unishard plan</code>, not counted</p>"
    )


def _bars(rows: Sequence[Measured]) -> Iterator[str]:
    timed = [(row, seconds) for row in rows if (seconds := row.median("step_seconds")) is not None]
    most = max((seconds for _, seconds in timed), default=1.0) or 1.0
    yield f'<svg viewBox="0 0 {_WIDTH} {_BAR * len(timed)}" width="{_WIDTH}" role="img" aria-label="seconds of a step">'
    for at, (row, seconds) in enumerate(timed):
        top, width = at * _BAR, (_WIDTH - _LABEL - 80) * seconds / most
        yield f'<text x="{_LABEL - 8}" y="{top + 15}" text-anchor="end">{escape(str(row.candidate))}</text>'
        yield (
            f'<rect x="{_LABEL}" y="{top + 3}" width="{width:.1f}" height="{_BAR - 6}" '
            f'fill="{_COLORS[at % len(_COLORS)]}"/>'
        )
        yield f'<text x="{_LABEL + width + 6:.1f}" y="{top + 15}">{seconds:.4g}</text>'
    yield "</svg>"


def _curves(rows: Sequence[Measured]) -> Iterator[str]:
    points = [
        [(record["step"], record["loss"]) for record in row.records if record.get("loss") is not None] for row in rows
    ]
    steps, losses = ([point[at] for curve in points for point in curve] for at in (0, 1))
    if not steps:
        return
    left, low, high = min(steps), min(losses), max(losses)
    across, up = max(max(steps) - left, 1), (high - low) or 1.0
    height = _HIGH + _BAR * len(rows)
    yield f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" role="img" aria-label="loss by step">'
    yield f'<text x="0" y="12">{high:.4g}</text><text x="0" y="{_HIGH - 6}">{low:.4g}</text>'
    for at, (row, curve) in enumerate(zip(rows, points, strict=True)):
        color = _COLORS[at % len(_COLORS)]
        path = " ".join(
            f"{60 + (_WIDTH - 70) * (step - left) / across:.1f},{8 + (_HIGH - 20) * (high - loss) / up:.1f}"
            for step, loss in curve
        )
        # Curves that lie on each other are all seen: the later ones are thinner.
        yield f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{max(1.5, 5 - 1.5 * at)}"/>'
        top = _HIGH + at * _BAR
        yield f'<rect x="60" y="{top + 5}" width="14" height="4" fill="{color}"/>'
        yield f'<text x="80" y="{top + 12}">{escape(str(row.candidate))}</text>'
    yield "</svg>"
