"""What the activations of one micro-batch take, by phase and module. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self

from unishard.contract.footprint import Collective

Phase = Literal["forward", "backward"]
Kind = Literal["all_to_all", "all_gather", "all_reduce"]
"""Of a collective."""


class Exchanged(NamedTuple):
    """Collectives of one kind inside a forward or a backward."""

    kind: Kind
    phase: Phase
    ranks: int
    """Of the group."""
    stride: int
    """Distance of neighbors in it."""
    nbytes: int
    """Of their full tensors on one rank."""
    calls: int

    @property
    def collective(self) -> Collective:
        """All of them, as of one optimizer step."""
        return Collective(self.kind, "activations", self.phase, self.nbytes, self.ranks, self.stride)


class Segment(NamedTuple):
    """A part of a micro-batch in which one module computes."""

    phase: Phase
    module: str
    """A unit, a module outside the units, or empty for what the model computes itself, such as the loss."""
    unit: int
    """Index of the unit in the model's shape; -1 for what belongs to the root."""
    nbytes: int
    """The most bytes of activations alive in it, also those that earlier modules keep for backward."""
    end: int
    """Bytes of activations at its end."""


@dataclass(frozen=True)
class Activations:
    """The segments of one forward and backward, in order."""

    micro_batch_size: int
    seq_len: int
    recomputation: str
    """`activation_checkpointing` as text."""
    segments: tuple[Segment, ...]
    on_host: int = 0
    """The most bytes that lie in host memory at once."""
    exchanged: tuple[Exchanged, ...] = ()
    """What ranks that have samples, layers or experts together send each other."""

    @property
    def peak(self) -> int:
        """The most bytes alive at once."""
        return max((segment.nbytes for segment in self.segments), default=0)

    def exchanged_in(self, micro_batches: int) -> tuple[Exchanged, ...]:
        """What several of them exchange."""
        return tuple(
            each._replace(nbytes=each.nbytes * micro_batches, calls=each.calls * micro_batches)
            for each in self.exchanged
        )

    def offloaded(self) -> Self:
        """The same with `offload.activations: cpu`: what the unit that computes keeps is on the device, and what its
        neighbor keeps, which is on its way; what all units before them keep is on the host.
        """
        kept: dict[int, int] = {}
        end, segments = 0, []
        for segment in self.segments:
            before = [*kept]
            if segment.phase == "backward" and segment.unit in kept:
                before = before[: before.index(segment.unit)]
            away = sum(kept[unit] for unit in before[:-1])
            sizes = (max(size - away, 0) for size in (segment.nbytes, segment.end))
            segments.append(Segment(segment.phase, segment.module, segment.unit, *sizes))
            if segment.phase == "forward" and segment.unit >= 0:
                kept[segment.unit] = kept.get(segment.unit, 0) + max(segment.end - end, 0)
            end = segment.end
        return replace(self, segments=tuple(segments), on_host=sum(kept.values()))

    def map(self, measure: Callable[[Sequence[int]], int], *others: Self, **changes: int) -> Self:
        """The same segments with other bytes.

        Args:
            measure: Returns bytes from those of a segment in this trace and in the others.
            others: Traces of the same model.
            changes: `micro_batch_size` or `seq_len` of the result.
        """
        traces = [_placed(activations.segments) for activations in (self, *others)]
        segments = []
        for place in sorted(set().union(*traces)):
            same = [trace.get(place) or _covering(trace, place) for trace in traces]
            named = next(trace[place] for trace in traces if place in trace)
            sizes_of = zip(*((segment.nbytes, segment.end) for segment in same), strict=True)
            segments.append(Segment(named.phase, named.module, named.unit, *map(measure, sizes_of)))
        sizes = {"micro_batch_size": self.micro_batch_size, "seq_len": self.seq_len} | changes
        return type(self)(sizes["micro_batch_size"], sizes["seq_len"], self.recomputation, tuple(segments))


def _covering(trace: Mapping[tuple[int, int], Segment], place: tuple[int, int]) -> Segment:
    """The segment after a place."""
    return trace[min((at for at in trace if at > place), default=max(trace))]


def _placed(segments: Sequence[Segment]) -> dict[tuple[int, int], Segment]:
    """Segments by their place: how many modules have computed before, and a number.

    Traces of one model name the same modules. A segment between modules is only in traces where it is large; in the
    others the next module covers it.
    """
    by_place: dict[tuple[int, int], Segment] = {}
    count = 0
    for segment in segments:
        by_place[count, 2 if segment.module else segment.phase == "backward"] = segment
        count += bool(segment.module)
    return by_place
