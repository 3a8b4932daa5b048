"""A plan as one HTML page without anything from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from textwrap import wrap

from unishard.config.describe import count_of
from unishard.tools.plan.candidates import Candidate, wire_of
from unishard.tools.plan.devices import in_gib, with_unit
from unishard.tools.plan.planning import Plan

# -- A plan as lines of at most 80 columns ---------------------------------------------------------

_WIDTH = 80
_COLUMNS = ("params", "master", "grads", "optim", "buffer", "activ", "peak")
_BAR = 40


def lines_of(plan: Plan) -> Iterator[str]:
    """The plan for a terminal or a file."""
    yield from _heading(plan)
    for backend in dict.fromkeys(each.backend for each in plan.candidates):
        yield ""
        yield from _text_table(plan, [each for each in plan.candidates if each.backend == backend])
    yield ""
    yield from _peaks(plan)
    yield from _activations(plan)
    yield from _bars(plan)
    yield from _verdict(plan)


def _heading(plan: Plan) -> Iterator[str]:
    shape, topology = plan.shape, plan.topology
    trainable = sum(parameter.numel for parameter in shape.trainable)
    ranks, nodes = topology.world_size, topology.world_size // topology.local_world_size
    said = f"{plan.model}: {_count(shape.numel)} parameters" + (
        f", {_count(trainable)} trainable" if trainable != shape.numel else ""
    )
    where = f"{ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}"
    on = f"; {plan.device.name}, {with_unit(plan.device.memory)}" if plan.device else ""
    yield from wrap(f"{said}; {where}{on}", _WIDTH)
    sizes = (
        f"micro-batch {plan.cfg.training.micro_batch_size} x {plan.seq_len} tokens" if plan.activations else plan.note
    )
    word = next(iter(plan.activations), "")
    yield from wrap(
        f"GiB on the rank that holds most; {sizes}" + (f"; activation_checkpointing: {word}" if word else ""), _WIDTH
    )


def _text_table(plan: Plan, candidates: list[Candidate]) -> Iterator[str]:
    yield (
        f"{candidates[0].backend:<22}" + "".join(f"{name:>7}" for name in _COLUMNS) + ("  fits" if plan.device else "")
    )
    for each in candidates:
        label = ("* " if each is plan.own else "  ") + each.strategy
        if each.footprint is None or each.peak is None:
            yield from wrap(f"{label:<22} {each.refusal}", _WIDTH, subsequent_indent=" " * 23)
            continue
        footprint = each.footprint
        sizes = (
            footprint.parameters.device,
            footprint.masters.device,
            footprint.gradients.device,
            footprint.optimizer.device,
            footprint.buffers.device + footprint.gathered,
            each.activations,
            each.peak.nbytes,
        )
        host = footprint.persistent.host
        yield (f"{label:<22}" + "".join(f"{in_gib(size):>7}" for size in sizes) + f"  {_fits(plan, each)}").rstrip()
        if host:
            yield f"    and {with_unit(host)} of host memory"


def _fits(plan: Plan, each: Candidate) -> str:
    if plan.device is None:
        return ""
    if not each.fits(plan.device.memory):
        return "no"
    return "yes" if each.fits(plan.device.memory, surely=True) else "~"


def _peaks(plan: Plan) -> Iterator[str]:
    yield (
        f"{'':<32}{'peak in the':<28}{'sends':>8}{'of it':>12}"
        if plan.device is None
        else (f"{'':<32}{'peak in the':<25}{'in node':>7}{'between':>8}{'seconds':>8}")
    )
    for each in plan.candidates:
        if each.footprint is None or each.peak is None:
            continue
        where = each.peak.where
        shown = where if len(where) <= 24 else where[:10] + "..." + where[-11:]
        line = f"{each.backend:<11}{each.strategy:<21}{shown:<25}"
        if plan.device is not None:
            wire = wire_of(each.footprint, plan.topology, plan.device)
            line += f"{in_gib(wire.within):>7}{in_gib(wire.between):>8}{wire.seconds:>8.3f}"
        yield line.rstrip()


def _activations(plan: Plan) -> Iterator[str]:
    if plan.activations:
        yield ""
        found = "; ".join(f"{word} {in_gib(each.peak)}" for word, each in plan.activations.items())
        yield from wrap(f"activations at their peak by activation_checkpointing, GiB: {found}", _WIDTH)
    if plan.note:
        yield from wrap(f"note: {plan.note}", _WIDTH)


def _bars(plan: Plan) -> Iterator[str]:
    own = plan.own
    if own.footprint is None or own.peak is None:
        return
    parts = {name: size.device for name, size in own.footprint.parts.items()}
    parts["buffers"] += own.footprint.gathered
    parts["activations"] = own.activations
    most = max([*parts.values(), 1])
    yield ""
    yield f"{own.strategy} on {own.backend}, GiB on the device"
    for name, size in parts.items():
        if size:
            yield f"  {name:<16}{in_gib(size):>8} {'#' * max(1, round(_BAR * size / most))}"
    low, high = own.reserved
    yield f"  {'peak':<16}{in_gib(own.peak.nbytes):>8} in the {own.peak.where}"[:_WIDTH]
    yield f"  (the parts peak at different times; the allocator reserves {in_gib(low)} to {in_gib(high)})"


def _verdict(plan: Plan) -> Iterator[str]:
    if plan.answers is not None:
        found = plan.answers
        yield ""
        ranks = f"needs {found.ranks} rank{'s' * (found.ranks > 1)}" if found.ranks else "fits on no number of ranks"
        sizes = f"the largest micro-batch is {found.micro_batch_size}, the longest sequence {found.seq_len}"
        yield from wrap(f"{plan.own.strategy} on {plan.own.backend}: {sizes}; as it is, it {ranks}", _WIDTH)
    if plan.recommendation is not None:
        yield ""
        yield from wrap(f"recommendation: {plan.recommendation.reason}", _WIDTH)
        if plan.recommendation.changes:
            yield from (f"  {change.replace('=', ': ', 1)}" for change in plan.recommendation.changes)


def _count(numel: int) -> str:
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if numel >= size:
            return f"{numel / size:.2f} {unit}"
    return str(numel)


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
