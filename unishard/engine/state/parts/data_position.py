"""Where each rank is in the training data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist

from unishard.checkpoint.user_state import pack
from unishard.contract.training_facts import PassFacts
from unishard.data import position
from unishard.data.position import Position
from unishard.distributed.on_ranks import on_all
from unishard.engine.state.part import CheckpointSource, Part, Saved, of_all_ranks, whole
from unishard.engine.state.parts.edited import require
from unishard.engine.state.run import Run


class DataPosition(Part):
    """Resumed unless `engine.load(data=False)`; on another number of ranks derived from those of all ranks."""

    def __init__(self, run: Run) -> None:
        """Of a run."""
        self._run = run
        self._positions: list[Position | None] = []
        self.epoch: int | None = 0
        """That of the loaded position, from 0; None if unknown."""

    def saved(self, group: dist.ProcessGroup) -> Saved:
        """As in `Part`."""
        batching, prefix = self._run.batching, f"data.rank{dist.get_rank():05d}."
        packed, tensors = on_all(group, lambda: pack(batching.position(), prefix))
        return Saved(whole(tensors), {"data": of_all_ranks(packed, group), "passes": batching.training.passes()})

    def check(self, source: CheckpointSource) -> None:
        """As in `Part`: an edited manifest may have any."""
        if source.data:
            self._positions = [source.unpack(each) for each in source.manifest.data]
            require(self._wrong(source.manifest.world_size))

    def resume(self, source: CheckpointSource, group: dist.ProcessGroup) -> Iterator[str]:
        """As in `Part`."""
        manifest, training = source.manifest, self._run.batching.training
        if source.data:
            self.epoch = self._epoch(source)
            if self._run.accumulation is not None:
                yield from self._lost(source)
        if source.data or not training.open:
            sharing = sharing_of(manifest.config, manifest.world_size)
            passes = manifest.passes if source.data else None
            self._run.batching.resume(self._positions[::sharing], manifest.world_size // sharing, passes)
        else:
            training.go_on()

    def _wrong(self, world_size: int) -> Iterator[str]:
        if self._positions and len(self._positions) != world_size:
            yield f"data has {len(self._positions)} entries for {world_size} ranks"
        for index, saved in enumerate(self._positions):
            if not position.is_position(saved):
                yield f"data.{index} is {saved!r:.60}"

    def _epoch(self, source: CheckpointSource) -> int | None:
        manifest = source.manifest
        if not manifest.step:
            return 0
        known = next((position.epoch_of(each) for each in self._positions if each is not None), None)
        return manifest.passes.epoch if known is None and manifest.passes is not None else known

    def _lost(self, source: CheckpointSource) -> Iterator[str]:
        """What cannot be resumed, as far as `engine.batches` has read the data."""
        saved = [each["loader"] for each in self._positions if each is not None]
        passes = source.manifest.passes
        read = PassFacts(loader=saved[0]) if saved and passes is None else passes
        if read is None:
            return
        loader = read.loader
        if read.batches and not saved:
            yield (
                f"{read.batches} batches of an epoch had been read, and no position in the data was saved, since "
                f"{loader} has none: it starts from its beginning; train with unishard.dataloader(dataset, cfg), or "
                "another loader with a state_dict"
            )
        if self.epoch is None:
            yield (
                f"the epoch of the {loader} is unknown, so `epoch` is None; count epochs in the loop, and save the "
                "number: engine.save(state={'epoch': epoch})"
            )


def sharing_of(config: Mapping[str, Any] | None, world_size: int) -> int:
    """The neighboring ranks of a run that share each sample, and so have the same position in the data."""
    sections = (config or {}).get("parallel", {})
    sizes = [sections.get(name, {}).get("size", 1) for name in ("sequence", "tensor")]
    known = all(isinstance(size, int) and size > 0 for size in sizes)
    return size if known and world_size % (size := math.prod(sizes)) == 0 else 1
