"""A position in torch's own `DataLoader`, where its sampler can repeat an order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from unishard.data.loader import is_count

KIND = "torch.utils.data.DataLoader"
"""What a position says of it."""
_REPEAT = (SequentialSampler, DistributedSampler)
"""Samplers whose order depends on their attributes only."""
_DRAW = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Those that draw it, at the first batch, from a generator of their own or torch's global one."""
_OPTIONS = ("num_replicas", "rank", "seed", "shuffle", "replacement")
"""What decides their order besides the length and the random numbers."""


def is_state(value: object) -> bool:
    """Whether a value can be a `TorchLoader.state_dict`."""
    if not isinstance(value, dict) or not is_count(value.get("batches")) or not isinstance(value.get("random"), list):
        return False
    return all(isinstance(state, Tensor) and state.dtype is torch.uint8 for state in value["random"])


class TorchLoader:
    """One pass over a `DataLoader`. A resumed one draws the order again, and reads no batch that it leaves out."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader, self._sampler = loader, loader.sampler
        self._done, self._skipped = 0, 0
        self._drawn_from: list[Tensor] = []
        """The states of the generators when the pass began."""

    @staticmethod
    def fits(loader: Any) -> bool:
        """Whether it can repeat the order of a loader."""
        return (
            type(loader) is DataLoader
            and loader.in_order
            and not isinstance(loader.dataset, IterableDataset)
            and type(loader.batch_sampler) is BatchSampler
            and loader.batch_sampler.sampler is loader.sampler
            and type(loader.sampler) in (*_REPEAT, *_DRAW)
        )

    def __len__(self) -> int:
        """Batches of a full pass."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._done, self._skipped = self._skipped, 0
        with torch.random.fork_rng(devices=[], enabled=self._done > 0):
            if not self._done:
                self._drawn_from = self._states()
                batches = iter(self._loader)
            else:
                self._draw_from(self._drawn_from)
                order = _LaterBatches(self._loader.batch_sampler, self._done)
                batches = iter(_over(self._loader, order))
                order.leave_out()
        for batch in batches:
            self._done += 1
            yield batch
        self._done = 0

    def identity(self) -> dict[str, Any]:
        """What must be equal for the order to be the same."""
        loader, sampler = self._loader, self._sampler
        options = {name: getattr(sampler, name) for name in _OPTIONS if hasattr(sampler, name)}
        kind = {"sampler": type(sampler).__name__, "samples": len(sampler)}  # type: ignore[arg-type]
        return {**kind, **options, "batch_size": loader.batch_size, "drop_last": loader.drop_last}

    def state_dict(self) -> dict[str, Any]:
        """The position, and what the order is drawn from."""
        states = self._drawn_from if self._done or self._skipped else self._states()
        return {
            "batches": self._done or self._skipped,
            "epoch": getattr(self._sampler, "epoch", None),
            "random": states,
            **self.identity(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the pass begin at a position of the same order."""
        self._skipped, self._drawn_from = state["batches"], state["random"]
        if not self._skipped:
            self._draw_from([torch.get_rng_state(), *self._drawn_from[1:]])
        elif isinstance(self._sampler, DistributedSampler):
            self._sampler.set_epoch(state["epoch"])

    def _generators(self) -> list[torch.Generator]:
        """Those of the user that decide the order."""
        own = [getattr(self._sampler, "generator", None), self._loader.generator]
        return list(dict.fromkeys(each for each in own if each is not None))

    def _states(self) -> list[Tensor]:
        if type(self._sampler) in _REPEAT:
            return []
        return [torch.get_rng_state(), *(each.get_state() for each in self._generators())]

    def _draw_from(self, states: list[Tensor]) -> None:
        if states:
            torch.set_rng_state(states[0])
            for generator, state in zip(self._generators(), states[1:], strict=True):
                generator.set_state(state)


class _LaterBatches(Sampler[list[int]]):
    """The rest of an order of batches."""

    def __init__(self, batches: Any, left_out: int) -> None:
        self._batches, self._left_out = batches, left_out

    def __len__(self) -> int:
        return len(self._batches) - self._left_out

    def __iter__(self) -> Iterator[list[int]]:
        self._order = iter(self._batches)
        return self

    def __next__(self) -> list[int]:
        self.leave_out()
        return next(self._order)

    def leave_out(self) -> None:
        """Draw the order, as a loader does after it has drawn the seed of its workers."""
        deque(islice(self._order, self._left_out), maxlen=0)
        self._left_out = 0


def _over(loader: DataLoader[Any], batches: _LaterBatches) -> DataLoader[Any]:
    """A loader as another one, over other batches."""
    return DataLoader(
        loader.dataset,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
    )
