"""A plan as lines of at most 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap

from unishard.tools.plan.candidates import Candidate, wire_of
from unishard.tools.plan.devices import in_gib, with_unit
from unishard.tools.plan.planning import Plan

_WIDTH = 80
_BAR = 40
_COLUMNS = ("params", "master", "grads", "optim", "buffer", "activ", "peak")


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
    sizes = _micro_batch_of(plan) if plan.activations else plan.note
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


def _micro_batch_of(plan: Plan) -> str:
    whole = f"micro-batch {plan.cfg.training.micro_batch_size} x {plan.seq_len} tokens"
    sharing = plan.cfg.parallel.sequence.size
    if sharing == 1:
        return whole
    part = -(-plan.seq_len // sharing)
    return f"{whole}, of which each of {sharing} ranks has {part} (what attention exchanges is left out)"
