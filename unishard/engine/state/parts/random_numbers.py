"""The random generators of each rank."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor

from unishard.checkpoint.tensor_names import RANDOM
from unishard.config.describe import count_of
from unishard.engine.state import random_state
from unishard.engine.state.part import CheckpointSource, Part, Saved, whole
from unishard.engine.state.run import Run


class RandomNumbers(Part):
    """Resumed where as many ranks go on; else seeded from seed, step and rank."""

    def __init__(self, run: Run) -> None:
        """Of a run."""
        self._run = run
        rank = dist.get_rank()
        self._prefix = f"{RANDOM}rank{rank:05d}."
        self._first = f"{RANDOM}rank{rank - rank % run.tensor:05d}."
        """Of the first of the ranks that draw the same, also where others were saved."""
        self._states: dict[str, Tensor] = {}

    def saved(self, group: dist.ProcessGroup) -> Saved:
        """As in `Part`."""
        states = random_state.capture_random(self._run.adapter.device)
        return Saved(whole({self._prefix + kind: state for kind, state in states.items()}), {})

    def check(self, source: CheckpointSource) -> None:
        """As in `Part`: a state must fit its generator."""
        if self._run.accumulation is not None and source.same_ranks:
            self._states = source.full(self._first)
            random_state.require_random(self._states, self._run.adapter.device)

    def resume(self, source: CheckpointSource, group: dist.ProcessGroup) -> Iterator[str]:
        """As in `Part`."""
        if self._run.accumulation is None:
            return
        if self._states:
            random_state.restore_random(self._states, self._run.adapter.device)
            return
        random_state.reseed(self._run.training.seed, source.manifest.step, dist.get_rank() // self._run.tensor)
        saved_by = count_of(source.manifest.world_size, "rank")
        why = "no random state was saved" if source.same_ranks else f"saved by {saved_by}"
        yield f"{why}, so random generators (dropout and others) are seeded from training.seed, step and rank"
