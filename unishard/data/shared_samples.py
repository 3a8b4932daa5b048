"""Compares what ranks read that share samples."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from unishard.data.digest import of_value
from unishard.distributed import agreement
from unishard.distributed.nested_tensors import tensors_in
from unishard.distributed.process_group import own_group
from unishard.errors import DataError


class SharedSamples:
    """Neighboring ranks that must pass the same tensors."""

    def __init__(self, size: int, field: str) -> None:
        """Make the groups. Collective.

        Args:
            size: Of a group; it divides the ranks.
            field: Of the config, that says so.
        """
        groups = [range(first, first + size) for first in range(0, dist.get_world_size(), size)]
        self._group, self._size, self._field = own_group(groups, "gloo"), size, field

    def require(self, samples: Any) -> None:
        """Check that all of them have the same. Collective in the group.

        Raises:
            DataError: They have not.
        """
        if not agreement.equal(of_value(list(tensors_in(samples))), self._group):
            first = dist.get_rank() - dist.get_rank() % self._size
            raise DataError(
                f"ranks {first} to {first + self._size - 1} share each sample ({self._field} is {self._size}), but "
                "have read different ones; use unishard.dataloader(dataset, cfg), or let the ranks of a group read the "
                "same share: rank // size of world_size // size"
            )
