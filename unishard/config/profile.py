"""Which optimizer steps are profiled, and what is recorded of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from unishard.config.paths import Directory
from unishard.config.relevance import Not, OffAt, OnlyWith
from unishard.config.section import Section

_PROFILED = OnlyWith(
    {"steps": Not([])},
    "no step is profiled",
    "is unused without profile.steps; name the steps, or remove profile.{field}",
)


class Profile(Section):
    """Traces of chosen optimizer steps by `torch.profiler`, the same on every engine. Training does not change.

    `profile: [10, 11]` stands for `steps`.
    """

    shorthand: ClassVar[tuple[str, ...]] = ("steps",)

    steps: Annotated[list[int], OffAt([])] = Field(default=[])
    """The optimizer steps to record, counted from 1 at the start of the training, also after a resume. Consecutive ones
    share a trace; take some after the first few, which compile and allocate. Empty: none."""
    dir: Annotated[Directory, _PROFILED] = Field(default=None)
    """Directory for the files: `steps-10-12.rank0.trace.json`, for chrome://tracing or ui.perfetto.dev."""
    ranks: Annotated[Literal["first", "all"], _PROFILED] = Field(default="first")
    """Whose steps are recorded: rank 0's, or those of each rank, in a file each."""
    memory: Annotated[bool, _PROFILED] = Field(default=False)
    """Whether memory is recorded too. On CUDA a snapshot with the stack of each allocation,
    `steps-10-12.rank0.memory.pickle`, for pytorch.org/memory_viz; on a CPU the bytes allocated over time,
    `steps-10-12.rank0.memory.json`."""
    shapes: Annotated[bool, _PROFILED] = Field(default=False)
    """Whether the trace has the input shapes of each operation. The steps get slower, and the files larger."""

    def _problems(self) -> Iterator[tuple[str, str]]:
        if any(step < 1 for step in self.steps):
            yield "steps", f"counts from 1, got {min(self.steps)}; write numbers of at least 1, such as [10, 11]"
        elif list(self.steps) != sorted(set(self.steps)):
            yield "steps", "must rise, without a number twice; sort them, as in [10, 11, 12]"
        if self.dir is not None and not self.dir.strip():
            yield "dir", "is empty; write a directory, or null for none"
        if self.steps and self.dir is None:
            yield "dir", "is missing; traces need a directory, such as runs/profile"
