"""A plan as lines of at most 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap

from unishard.tools.plan.candidates import Candidate, wire_of
from unishard.tools.plan.devices import Device, in_gib, with_unit
from unishard.tools.plan.planning import Plan

_WIDTH = 80
_BAR = 40
_COLUMNS = ("params", "master", "grads", "optim", "buffer", "activ", "peak")


def lines_of(plan: Plan) -> Iterator[str]:
    """The plan for a terminal or a file."""
    yield from _heading(plan)
    for backend in dict.fromkeys(candidate.backend for candidate in plan.candidates):
        yield ""
        yield from _text_table(plan, [candidate for candidate in plan.candidates if candidate.backend == backend])
    yield ""
    yield from _peaks(plan)
    yield from _activations(plan)
    yield from _bars(plan)
    yield from _answers(plan)


def _heading(plan: Plan) -> Iterator[str]:
    shape, topology = plan.shape, plan.topology
    every, trainable = (sum(each.full_numel for each in some) for some in (shape.parameters, shape.trainable))
    ranks, nodes = topology.world_size, topology.world_size // topology.local_world_size
    model = f"{plan.model}: {_count(every)} parameters" + (
        f", {_count(trainable)} trainable" if trainable != every else ""
    )
    where = f"{ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}"
    on = f"; {_device(plan.device)}" if plan.device else ""
    yield from wrap(f"{model}; {where}{on}", _WIDTH)
    sizes = _micro_batch_of(plan) if plan.activations else plan.note
    word = next(iter(plan.activations), "")
    yield from wrap(
        f"GiB on the rank that holds most; {sizes}" + (f"; activation_checkpointing: {word}" if word else ""), _WIDTH
    )


def _device(device: Device) -> str:
    memory = with_unit(device.memory)
    return f"{device.name}, {memory}" if device.name else f"{memory} of memory"


def _text_table(plan: Plan, candidates: list[Candidate]) -> Iterator[str]:
    yield (
        f"{candidates[0].backend:<22}" + "".join(f"{name:>7}" for name in _COLUMNS) + ("  fits" if plan.device else "")
    )
    for candidate in candidates:
        label = ("* " if candidate is plan.own else "  ") + candidate.strategy
        if candidate.footprint is None or candidate.peak is None:
            yield from wrap(f"{label:<22} {candidate.refusal}", _WIDTH, subsequent_indent=" " * 23)
            continue
        footprint = candidate.footprint
        sizes = (
            footprint.parameters.device,
            footprint.masters.device,
            footprint.gradients.device,
            footprint.optimizer.device,
            footprint.buffers.device + footprint.gathered,
            candidate.activations,
            candidate.peak.nbytes,
        )
        host, files = footprint.persistent.host, footprint.persistent.files
        yield (
            f"{label:<22}" + "".join(f"{in_gib(size):>7}" for size in sizes) + f"  {_fits(plan, candidate)}"
        ).rstrip()
        if host:
            yield f"    and {with_unit(host)} of host memory"
        if files:
            each = with_unit(footprint.optimizer.files)
            seconds = plan.disk_seconds(candidate)
            least = "" if seconds is None else f": {seconds:.2f} s or more"
            yield f"    and {with_unit(files)} in files; an update reads and writes {each}{least}"


def _fits(plan: Plan, candidate: Candidate) -> str:
    if plan.device is None:
        return ""
    if not candidate.fits(plan.device.memory):
        return "no"
    return "yes" if candidate.fits(plan.device.memory, surely=True) else "~"


def _peaks(plan: Plan) -> Iterator[str]:
    yield (
        f"{'':<32}{'peak in the':<28}{'sends':>8}{'of it':>12}"
        if plan.device is None
        else (f"{'':<32}{'peak in the':<25}{'in node':>7}{'between':>8}{'seconds':>8}")
    )
    for candidate in plan.candidates:
        if candidate.footprint is None or candidate.peak is None:
            continue
        where = candidate.peak.where
        shown = where if len(where) <= 24 else where[:10] + "..." + where[-11:]
        line = f"{candidate.backend:<11}{candidate.strategy:<21}{shown:<25}"
        if plan.device is not None:
            wire = wire_of(candidate.footprint, plan.topology, plan.device)
            line += f"{in_gib(wire.within):>7}{in_gib(wire.between):>8}{wire.seconds:>8.3f}"
        yield line.rstrip()


def _activations(plan: Plan) -> Iterator[str]:
    if plan.activations:
        yield ""
        peaks = "; ".join(f"{word} {in_gib(traced.peak)}" for word, traced in plan.activations.items())
        yield from wrap(f"activations at their peak by activation_checkpointing, GiB: {peaks}", _WIDTH)
        own = next(iter(plan.activations.values()))
        if own.on_host:
            said = (
                f"offload.activations: those of about two units are on the device, {with_unit(own.on_host)} on the host"
            )
            yield from wrap(said, _WIDTH)
    if plan.exchanged:
        sent = "; ".join(
            f"{each.calls} {each.kind} over {each.ranks} ranks in {each.phase}, {with_unit(each.nbytes)}"
            for each in plan.exchanged
        )
        yield from wrap(f"what ranks of a group exchange in a step, with the tensors on a rank: {sent}", _WIDTH)
    if plan.note:
        yield from wrap(f"note: {plan.note}", _WIDTH)


def _bars(plan: Plan) -> Iterator[str]:
    configured = plan.own
    if configured.footprint is None or configured.peak is None:
        return
    parts = {name: size.device for name, size in configured.footprint.parts.items()}
    parts["buffers"] += configured.footprint.gathered
    parts["activations"] = configured.activations
    most = max([*parts.values(), 1])
    yield ""
    yield f"{configured.strategy} on {configured.backend}, GiB on the device"
    for name, size in parts.items():
        if size:
            yield f"  {name:<16}{in_gib(size):>8} {'#' * max(1, round(_BAR * size / most))}"
    low, high = configured.reserved
    yield f"  {'peak':<16}{in_gib(configured.peak.nbytes):>8} in the {configured.peak.where}"[:_WIDTH]
    yield f"  (the parts peak at different times; the allocator reserves {in_gib(low)} to {in_gib(high)})"


def _answers(plan: Plan) -> Iterator[str]:
    if plan.answers is not None:
        answers = plan.answers
        yield ""
        ranks = (
            f"needs {answers.ranks} rank{'s' * (answers.ranks > 1)}" if answers.ranks else "fits on no number of ranks"
        )
        sizes = f"the largest micro-batch is {answers.micro_batch_size}, the longest sequence {answers.seq_len}"
        cut = "".join(f"; with parallel.{field}: {size} it fits on these" for field, size in answers.parallel.items())
        yield from wrap(f"{plan.own.strategy} on {plan.own.backend}: {sizes}; as it is, it {ranks}{cut}", _WIDTH)
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
    return f"{whole}, of which each of {sharing} ranks has {part}"
