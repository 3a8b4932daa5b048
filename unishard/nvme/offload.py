"""What a run keeps in files, as `offload` says."""

from __future__ import annotations

import logging
from itertools import accumulate
from pathlib import Path

from unishard.config import Offload
from unishard.config.topology import Topology
from unishard.contract.adapter import ShardedModel, Updates
from unishard.distributed.shard_optimizer import ShardOptimizer
from unishard.eight_bit.adamw import AdamW8bit
from unishard.errors import ConfigError, Problem
from unishard.nvme.moments_in_file import MomentsInFile
from unishard.nvme.rank_file import RankFile, refusal
from unishard.nvme.state_in_file import StateInFile
from unishard.nvme.weights_in_file import WeightsInFile

_logger = logging.getLogger("unishard")


class FileOffload:
    """The file of this rank, if the config asks for one."""

    def __init__(self, offload: Offload, topology: Topology) -> None:
        """Open it, before any rank allocates.

        Raises:
            ConfigError: The directory cannot be used.
        """
        self._offload, self._topology = offload, topology
        self._file: RankFile | None = None
        self._state: StateInFile | MomentsInFile | None = None
        if "nvme" in (offload.optimizer, offload.params) and offload.nvme_path is not None:
            self._file = RankFile(Path(offload.nvme_path), topology.rank)
            if self._file.over_network and topology.local_rank == 0:
                _logger.warning(
                    "offload.nvme_path: %s is on %s, so what lies there is read and written over the network; name a "
                    "directory on a local disk",
                    self._file.directory,
                    self._file.kind,
                )

    def take(self, model: ShardedModel) -> None:
        """Move the weights and the optimizer's state, as the config says.

        Raises:
            ConfigError: There is no room, or the optimizer needs whole tensors.
        """
        if self._file is None:
            return
        parts: list[WeightsInFile | StateInFile | MomentsInFile] = []
        if self._offload.params == "nvme":
            parts.append(WeightsInFile(model.weight_memory()))
        if self._offload.optimizer == "nvme" and model.updates is not None:
            self._state = _state_of(model.updates, pin_memory=self._offload.pin_memory)
            parts.append(self._state)
        starts = [0, *accumulate(part.nbytes for part in parts)]
        ranks, gib = self._topology.local_world_size, starts[-1] / 2**30
        try:
            self._file.allocate(starts[-1])
        except OSError as error:
            raise refusal(
                f"{self._file.directory} has no room: this rank needs {gib:.2f} GiB there, the {ranks} ranks of the "
                f"node {gib * ranks:.2f} GiB, and {self._file.free / 2**30:.2f} GiB were free ({error.strerror}); free "
                "some, or name another directory"
            ) from error
        for start, part in zip(starts, parts, strict=False):
            part.put_into(self._file, start)

    def close(self) -> None:
        """End the threads, and free the disk once no tensor lies there any more."""
        if self._state is not None:
            self._state.close()
        if self._file is not None:
            self._file.close()


def _state_of(updates: Updates, *, pin_memory: bool) -> StateInFile | MomentsInFile:
    optimizer = updates.torch_optimizer
    if isinstance(optimizer, AdamW8bit):
        return MomentsInFile(optimizer)
    if isinstance(optimizer, ShardOptimizer):
        kind = type(optimizer).__name__
        problem = f"nvme needs an optimizer that updates each element from its own state, not {kind}; choose cpu"
        raise ConfigError([Problem("offload.optimizer", problem)])
    return StateInFile(optimizer, updates.stepped(), pin_memory=pin_memory)
