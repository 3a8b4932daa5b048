"""Buffers that may differ between ranks: this rank's own, and those from which sums count."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor

from unishard.checkpoint.tensor_names import BUFFERS
from unishard.engine.loop.buffers import Merged
from unishard.engine.state.part import CheckpointSource, Part, Saved, whole
from unishard.engine.state.run import Run

_BASES = f"{BUFFERS}base."


class BuffersOfRanks(Part):
    """Beside the buffers of the model, which are those of all ranks together. Resumed where as many ranks go on."""

    def __init__(self, run: Run, merged: Merged | None) -> None:
        """To save, or to load where `merged` is None."""
        self._run, self._merged = run, merged
        self._prefix = f"{BUFFERS}rank{dist.get_rank():05d}."
        self._own: dict[str, Tensor] = {}
        self._bases: dict[str, Tensor] = {}

    def saved(self, group: dist.ProcessGroup) -> Saved:
        """As in `Part`."""
        own, bases = (self._merged.own, self._merged.bases) if self._merged else ({}, {})
        named = {self._prefix + name: buffer for name, buffer in own.items()}
        if not dist.get_rank():
            named |= {_BASES + name: buffer for name, buffer in bases.items()}
        return Saved(whole(named), {})

    def check(self, source: CheckpointSource) -> None:
        """As in `Part`: they can be read."""
        if self._run.accumulation is not None and source.same_ranks:
            self._own, self._bases = source.full(self._prefix), source.full(_BASES)

    def resume(self, source: CheckpointSource, group: dist.ProcessGroup) -> Iterator[str]:
        """As in `Part`."""
        self._run.buffers.resume(self._own, self._bases)
        yield from ()
