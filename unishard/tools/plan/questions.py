"""The inverse questions: what fits, how many GPUs are needed, and which strategy to take. Pure; imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from unishard.config import Config
from unishard.config.topology import Topology
from unishard.contract.model_shape import ModelShape
from unishard.tools.plan.activations import Activations
from unishard.tools.plan.candidates import Candidate, candidate_of, peak_of, wire_of
from unishard.tools.plan.devices import DEVICES, Device, with_unit

RECOMPUTATIONS = ("none", "selective", "full")
"""Words of `activation_checkpointing`, the cheapest in time first."""


def recomputations_of(cfg: Config) -> tuple[str, ...]:
    """Those that go with the rest of a config."""
    return RECOMPUTATIONS if cfg.offload.activations == "none" else ("none", "full")


_MOST_NODES = 4096
_REPEATED = 2
_MOST_SAMPLES, _MOST_TOKENS = 4096, 2**22
_TOKENS = 128
"""Sequence lengths are multiples of this."""

Trace = Callable[[int, int], Activations]
"""Activations for a micro-batch size and a sequence length."""


class Recommendation(NamedTuple):
    """What to write into the config, and why."""

    changes: tuple[str, ...]
    """As for `--set`; empty if the config stays as it is."""
    reason: str
    candidate: Candidate | None
    """None if nothing fits."""


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to `most` that fits; 0 if none does. What fits must fit below, too."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= most and fits(high):
        low, high = high, high * 2
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _at(candidate: Candidate, shape: ModelShape, activations: Activations, memory: int) -> bool:
    if candidate.footprint is None:
        return False
    peak, _ = peak_of(candidate.footprint, shape, activations)
    return peak.nbytes * candidate.footprint.reserved[0] <= memory


def largest_micro_batch(
    candidate: Candidate, shape: ModelShape, memory: int, trace: Trace, seq_len: int, chunk_tokens: int = 1
) -> int:
    """The largest micro-batch that fits; activations grow with it linearly.

    Args:
        candidate: The engine and strategy.
        shape: The model.
        memory: Bytes of the device.
        trace: Returns activations.
        seq_len: Tokens of a sample.
        chunk_tokens: As of `by_micro_batch`.
    """
    scaled = by_micro_batch(trace, seq_len, chunk_tokens)
    return largest(lambda count: _at(candidate, shape, scaled(count), memory), _MOST_SAMPLES)


def by_micro_batch(trace: Trace, seq_len: int, chunk_tokens: int = 1) -> Callable[[int], Activations]:
    """The activations of any micro-batch size, from two traces: they grow with it linearly.

    Args:
        trace: Returns activations.
        seq_len: Tokens of a sample.
        chunk_tokens: `training.loss_chunk_tokens`: from so many tokens on the loss takes no more.
    """
    few = -(-chunk_tokens // seq_len)
    one, two = trace(few, seq_len), trace(2 * few, seq_len)

    def scaled(count: int) -> Activations:
        return one.map(
            lambda sizes: sizes[0] + (sizes[1] - sizes[0]) * (count - few) // few, two, micro_batch_size=count
        )

    return scaled


def largest_seq_len(
    candidate: Candidate, shape: ModelShape, memory: int, trace: Trace, micro_batch_size: int, chunk_tokens: int = 1
) -> int:
    """The longest sequence that fits, a multiple of 128; activations grow as a polynomial of degree 2 (1 with fused
    attention).

    Args:
        candidate: The engine and strategy.
        shape: The model.
        memory: Bytes of the device.
        trace: Returns activations.
        micro_batch_size: Samples.
        chunk_tokens: As of `by_micro_batch`.
    """
    few = max(2, -(-chunk_tokens // (_TOKENS * micro_batch_size)))
    first, second, third = (trace(micro_batch_size, _TOKENS * few * times) for times in (1, 2, 3))

    def scaled(times: int) -> Activations:
        x = (times - few) / few  # 0, 1 and 2 at the three lengths

        def at(sizes: Sequence[int]) -> int:
            a, b, c = sizes
            return round(a + (b - a) * x + (c - 2 * b + a) * x * (x - 1) / 2)

        return first.map(at, second, third, seq_len=times * _TOKENS)

    return _TOKENS * largest(lambda times: _at(candidate, shape, scaled(times), memory), _MOST_TOKENS // _TOKENS)


def gpus_needed(
    cfg: Config,
    shape: ModelShape,
    activations: Activations | None,
    backend: str,
    strategy: str,
    memory: int,
    per_node: int,
) -> int | None:
    """The fewest ranks on which a strategy fits: a power of 2 within a node, else whole nodes; None if none of up to
    4,096 nodes.

    Args:
        cfg: The config; a stated global batch size is left out.
        shape: The model.
        activations: Of a micro-batch.
        backend: The engine.
        strategy: The strategy.
        memory: Bytes of a device.
        per_node: Ranks of a full node.
    """
    if cfg.training.global_batch_size is not None:
        cfg = cfg.override("training.global_batch_size=null")

    def fits(ranks: int) -> bool:
        topology = Topology(ranks, min(ranks, per_node))
        return candidate_of(cfg, shape, topology, activations, backend, strategy).fits(memory)

    ranks = 1
    while ranks < per_node:
        if fits(ranks):
            return ranks
        ranks *= 2
    if not fits(per_node * _MOST_NODES):
        return None
    low, high = 0, 1
    while not fits(per_node * high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(per_node * middle) else (middle, high)
    return per_node * high


def recommend(
    by_recomputation: Sequence[tuple[str, Sequence[Candidate]]],
    topology: Topology,
    device: Device,
    asked: Candidate,
    *,
    traced: bool = True,
) -> Recommendation:
    """The cheapest candidate that fits: first the least recomputation, then the least time on the wire, then the
    config's own engine.

    Args:
        by_recomputation: Words of `activation_checkpointing` with the candidates under candidate, the cheapest first.
        topology: The ranks.
        device: Memory and bandwidths.
        asked: What the config names.
        traced: Whether activations are known.
    """
    memory = device.memory
    planned = [
        (word, [candidate for candidate in rows if candidate.peak is not None]) for word, rows in by_recomputation
    ]

    def price(candidate: Candidate) -> tuple[float, int]:
        seconds = wire_of(candidate.footprint, topology, device).seconds if candidate.footprint else 0.0
        return seconds, _peak(candidate)

    for surely in (True, False):
        for word, candidates in planned:
            fitting = [candidate for candidate in candidates if candidate.fits(memory, surely=surely)]
            if fitting:
                best = min(fitting, key=price)
                reasons = [_reason(best, candidates, memory, price, traced=traced)]
                if asked.fits(memory, surely=surely) and _peak(best) > _peak(asked):
                    faster = price(asked)[0] - price(best)[0]
                    reasons.append(
                        f"{with_unit(_peak(best) - _peak(asked))} more than {asked.strategy} on {asked.backend}, for "
                        f"{faster:.2g} s less on the wire in each update"
                    )
                return Recommendation(_changes(best, word), "; ".join(reasons), best)
    nearest = min((candidate for _, candidates in planned for candidate in candidates), key=_peak, default=None)
    if nearest is None:
        return Recommendation((), "no engine can run this config", None)
    return Recommendation(
        (),
        f"nothing fits into {with_unit(memory)}; {nearest.strategy} on {nearest.backend} comes nearest with "
        f"{with_unit(_peak(nearest))}: use more ranks, a smaller micro-batch, or offload: cpu",
        None,
    )


def with_compilation(recommendation: Recommendation, cfg: Config, shape: ModelShape, device: Device) -> Recommendation:
    """The same, with `compile: per_block` for a model of blocks that are alike, on a known GPU, if nothing is compiled
    yet.
    """
    alike = Counter(tuple(parameter.shape for parameter in unit) for unit in shape.by_unit[:-1])
    count = max(alike.values(), default=0)
    if (
        recommendation.candidate is None
        or cfg.compile.mode != "none"
        or device.name not in DEVICES
        or count < _REPEATED
    ):
        return recommendation
    why = (
        f"compile: per_block compiles one of {count} blocks that are alike: faster steps after a longer first one, "
        "equal to rounding"
    )
    return recommendation._replace(
        changes=(*recommendation.changes, "compile=per_block"), reason=f"{recommendation.reason}; {why}"
    )


def _changes(best: Candidate, word: str) -> tuple[str, ...]:
    changes = f"backend={best.backend}", f"sharding.strategy={best.strategy}"
    recomputation = best.cfg.activation_checkpointing if best.cfg else word
    return (
        changes
        if recomputation == word or (isinstance(recomputation, list) and word == ", ".join(recomputation))
        else (*changes, f"activation_checkpointing={word}")
    )


def _reason(
    best: Candidate,
    candidates: Sequence[Candidate],
    memory: int,
    price: Callable[[Candidate], tuple[float, int]],
    *,
    traced: bool,
) -> str:
    where = best.peak.where if best.peak else ""
    peak = "its peak" if traced else "without activations, so by an unknown margin, its peak"
    reason = (
        f"{best.strategy} on {best.backend} sends the least of those that fit: {peak} is {with_unit(_peak(best))} of "
        f"{with_unit(memory)}, in the {where}"
    )
    cheaper = [
        candidate
        for candidate in candidates
        if not candidate.fits(memory, surely=True) and price(candidate) < price(best)
    ]
    if cheaper:
        next_ = min(cheaper, key=price)
        reason += f"; {next_.strategy} on {next_.backend} would send less, but needs {with_unit(_peak(next_))}"
    return reason


def _peak(candidate: Candidate) -> int:
    return candidate.peak.nbytes if candidate.peak else 0
