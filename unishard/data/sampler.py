"""Selects the samples that a rank reads, and their order."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Sampler

from unishard.errors import DataError


class ShareSampler(Sampler[list[int]]):
    """Assigns the micro-batches of one global order to the ranks round-robin.

    ```
    global order   | 7 2 | 0 5 | 3 6 | 1 4 |        2 samples each
    2 ranks        |  0  |  1  |  0  |  1  |
    1 rank         |  0  |  0  |  0  |  0  |
    ```

    torch's `DistributedSampler` assigns single samples instead, so its micro-batches depend on the number of ranks.
    """

    def __init__(
        self,
        dataset_length: int,
        micro_batch_size: int,
        *,
        rank: int,
        world_size: int,
        seed: int,
        shuffle: bool,
        drop_last: bool,
    ) -> None:
        """See `unishard.dataloader`.

        Raises:
            DataError: The dataset is empty, or with `drop_last` has fewer samples than one round of micro-batches.
        """
        self.round = micro_batch_size * world_size
        """Samples in one micro-batch of each rank."""
        self.dataset_length = dataset_length
        self.micro_batch_size = micro_batch_size
        self.epoch = 0
        """The epoch of the next iteration."""
        self.samples = 0
        """Position of the next iteration in that epoch: samples that all ranks have read in total."""
        self.identity = {"dataset_length": dataset_length, "seed": seed, "shuffle": shuffle}
        """What determines the order, besides the epoch."""
        self.rank, self.seed = rank, seed
        self._shuffle, self._drop_last = shuffle, drop_last
        if not dataset_length:
            raise DataError("the dataset is empty; it needs at least one sample")
        if not len(self):
            raise DataError(
                f"the dataset has {dataset_length} samples, fewer than the {self.round} of one micro-batch on each of "
                f"{world_size} ranks, and drop_last=True drops them; use drop_last=False, fewer ranks, or a smaller "
                "training.micro_batch_size"
            )

    def __len__(self) -> int:
        """Micro-batches of each rank in a full epoch."""
        return self.rounds_after(0)

    def rounds_after(self, samples: int) -> int:
        """Micro-batches of each rank in the rest of an epoch, after all ranks have read this many samples in total."""
        left = max(0, self.dataset_length - samples)
        return left // self.round if self._drop_last else -(-left // self.round)

    @property
    def repeated(self) -> int:
        """Samples that fill up the last micro-batches of an epoch."""
        return max(0, len(self) * self.round - self.dataset_length)

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's micro-batches from `samples` to the end of `epoch`. Iterating changes neither."""
        return self._micro_batches(self.epoch, self.samples)

    def _micro_batches(self, epoch: int, samples: int) -> Iterator[list[int]]:
        order = self.order(epoch)
        for turn in range(self.rounds_after(samples)):
            start = samples + turn * self.round + self.rank * self.micro_batch_size
            yield order[torch.arange(start, start + self.micro_batch_size) % self.dataset_length].tolist()

    def order(self, epoch: int) -> Tensor:
        """The dataset's indices in the order of an epoch, the same on every rank."""
        if not self._shuffle:
            return torch.arange(self.dataset_length)
        return torch.randperm(self.dataset_length, generator=torch.Generator().manual_seed(self.seed + epoch))
