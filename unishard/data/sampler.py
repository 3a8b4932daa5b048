"""Which samples a rank reads, in which order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from unishard.errors import DataError

__all__ = ["ShareSampler"]


class ShareSampler(Sampler[list[int]]):
    """Deals the micro-batches of one global order out to the ranks in turn.

    ```
    global order   | 7 2 | 0 5 | 3 6 | 1 4 |        2 samples each
    2 ranks        |  0  |  1  |  0  |  1  |
    1 rank         |  0  |  0  |  0  |  0  |
    ```

    torch's `DistributedSampler` deals out single samples instead, so that its micro-batches are others for each number of ranks.
    """

    def __init__(
        self, dataset_length: int, micro_batch_size: int, *, rank: int, world_size: int, seed: int, shuffle: bool, drop_last: bool
    ) -> None:
        """See `unishard.dataloader`.

        Raises:
            DataError: There is no sample, or with `drop_last` no full round of micro-batches.
        """
        self.round = micro_batch_size * world_size
        """Samples that all ranks together read in one micro-batch each."""
        self.dataset_length = dataset_length
        self.micro_batch_size = micro_batch_size
        self.epoch = 0
        """The epoch that the next iteration will be."""
        self.identity = {"dataset_length": dataset_length, "seed": seed, "shuffle": shuffle}
        """What decides the order, besides the epoch."""
        self._rank, self._seed, self._shuffle = rank, seed, shuffle
        self._rounds = dataset_length // self.round if drop_last else -(-dataset_length // self.round)
        if not dataset_length:
            raise DataError("the dataset is empty; it needs at least one sample")
        if not self._rounds:
            raise DataError(
                f"the dataset has {dataset_length} samples, fewer than the {self.round} of one micro-batch on each of {world_size} ranks, "
                "and drop_last=True leaves them out; use drop_last=False, fewer ranks, or a smaller training.micro_batch_size"
            )

    def __len__(self) -> int:
        """Micro-batches of each rank in an epoch."""
        return self._rounds

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's micro-batches of the next epoch. The epoch is taken when the first one is drawn."""
        return _Epoch(self)

    def order(self, epoch: int) -> Tensor:
        """The dataset's indices in the order of an epoch, the same on every rank."""
        if not self._shuffle:
            return torch.arange(self.dataset_length)
        return torch.randperm(self.dataset_length, generator=torch.Generator().manual_seed(self._seed + epoch))

    def micro_batch(self, order: Tensor, index: int) -> list[int]:
        """Indices of one micro-batch of this rank."""
        start = index * self.round + self._rank * self.micro_batch_size
        positions = torch.arange(start, start + self.micro_batch_size) % self.dataset_length
        return order[positions].tolist()


class _Epoch(Iterator[list[int]]):
    """One epoch of a `ShareSampler`. The loader saves and loads its state.

    StatefulDataLoader (torchdata 0.11) asks for more iterators than it uses, so only the first draw counts as an epoch.
    """

    def __init__(self, sampler: ShareSampler) -> None:
        self._sampler = sampler
        self._epoch: int | None = None
        self._index = 0
        self._order: Tensor | None = None

    def __next__(self) -> list[int]:
        if self._epoch is None:
            self._epoch = self._take(self._sampler.epoch)
        if self._index >= len(self._sampler):
            raise StopIteration
        if self._order is None:
            self._order = self._sampler.order(self._epoch)
        self._index += 1
        return self._sampler.micro_batch(self._order, self._index - 1)

    def _take(self, epoch: int) -> int:
        self._sampler.epoch = epoch + 1
        return epoch

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and how many of its samples all ranks together have read."""
        epoch = self._sampler.epoch if self._epoch is None else self._epoch
        return {"epoch": epoch, "samples": self._index * self._sampler.round, **self._sampler.identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken.

        Raises:
            DataError: It was taken of another order, or at a place that this number of ranks does not come by.
        """
        changed = [f"{name} was {state[name]}, is {now}" for name, now in self._sampler.identity.items() if state[name] != now]
        if changed:
            raise DataError(
                f"the loader's state belongs to another order of samples ({'; '.join(changed)}); load it with what it was saved with"
            )
        index, rest = divmod(state["samples"], self._sampler.round)
        if rest:
            raise DataError(
                f"the loader's state was saved after {state['samples']} samples, but these ranks read {self._sampler.round} at a time; "
                "use the number of ranks and the training.micro_batch_size that it was saved with"
            )
        self._epoch = self._take(state["epoch"])
        self._index, self._order = index, None
