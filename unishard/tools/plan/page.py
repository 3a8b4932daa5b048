"""A plan as one HTML page without anything from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from unishard.config.describe import count_of
from unishard.tools.plan.candidates import Candidate, wire_of
from unishard.tools.plan.devices import in_gib
from unishard.tools.plan.planning import Plan
from unishard.tools.plan.text import lines_of

_COLORS = {
    "parameters": "#4878a8",
    "master weights": "#6fa8dc",
    "gradients": "#d9822b",
    "optimizer state": "#8a6fb0",
    "buffers": "#999999",
    "activations": "#5f9e5f",
}
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#222;background:#fff}
table{border-collapse:collapse}td,th{padding:.2em .7em;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child,td.text{text-align:left}tr.own{font-weight:bold}
.bar{display:flex;width:24em;height:1.1em;background:#f3f3f3}.bar i{display:block}.key i{display:inline-block;width:1em;height:1em}
.no{color:#b00020}.yes{color:#1b7a1b}pre{background:#f6f6f6;padding:1em;overflow:auto}
"""


def page_of(plan: Plan) -> str:
    """The page."""
    return "\n".join(_page(plan)) + "\n"


def _page(plan: Plan) -> Iterator[str]:
    title = f"Plan of {plan.model} on {count_of(plan.topology.world_size, 'rank')}"
    yield "<!doctype html>"
    yield (
        '<html lang="en"><head><meta '
        f'charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style></head><body>'
    )
    yield f"<h1>{escape(title)}</h1>"
    if plan.recommendation is not None:
        yield f"<p><b>Recommendation:</b> {escape(plan.recommendation.reason)}</p>"
        if plan.recommendation.changes:
            yield f"<pre>{escape(chr(10).join(change.replace('=', ': ', 1) for change in plan.recommendation.changes))}</pre>"
    yield "<h2>Memory of one rank</h2>"
    yield (
        '<p class="key">'
        + " ".join(f'<i style="background:{color}"></i> {name} ' for name, color in _COLORS.items())
        + "</p>"
    )
    yield from _table(plan)
    yield f"<h2>As text</h2><pre>{escape(chr(10).join(lines_of(plan)))}</pre></body></html>"


def _table(plan: Plan) -> Iterator[str]:
    heads = ["engine and strategy", "", "peak", "in the", "sends in node", "between nodes", "seconds", "fits"]
    yield "<table><tr>" + "".join(f"<th>{name}</th>" for name in heads) + "</tr>"
    most = max((each.peak.nbytes for each in plan.candidates if each.peak), default=1)
    for each in plan.candidates:
        name = escape(f"{each.backend} {each.strategy}")
        own = ' class="own"' if each is plan.own else ""
        if each.peak is None:
            yield (
                f'<tr{own}><td>{name}</td><td class="text" colspan="{len(heads) - 1}">{escape(each.refusal)}</td></tr>'
            )
            continue
        cells = [name, _bar(each, most), in_gib(each.peak.nbytes), escape(each.peak.where), *_wire(plan, each)]
        yield f"<tr{own}>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    yield "</table>"


def _bar(each: Candidate, most: int) -> str:
    assert each.footprint is not None
    parts = {name: size.device for name, size in each.footprint.parts.items()}
    parts["buffers"] += each.footprint.gathered
    parts["activations"] = each.activations
    scale = 100 / max(most, sum(parts.values()), 1)
    pieces = (
        f'<i title="{name} {in_gib(size)}" style="width:{size * scale:.2f}%;background:{_COLORS[name]}"></i>'
        for name, size in parts.items()
    )
    return f'<div class="bar">{"".join(pieces)}</div>'


def _wire(plan: Plan, each: Candidate) -> Sequence[str]:
    if plan.device is None or each.footprint is None:
        return "", "", "", ""
    wire = wire_of(each.footprint, plan.topology, plan.device)
    word = "yes" if each.fits(plan.device.memory) else "no"
    return in_gib(wire.within), in_gib(wire.between), f"{wire.seconds:.3f}", f'<span class="{word}">{word}</span>'
