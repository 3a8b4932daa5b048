"""The codes of AdamW of 8 bits in a file, piece by piece in memory while it steps. Their scales stay in memory: 4 bytes
for each 256, and so does the state of small parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unishard.eight_bit.adamw import AdamW8bit, Update8bit
from unishard.eight_bit.codes import BLOCK
from unishard.eight_bit.moments import MOMENTS
from unishard.nvme.file_space import Cut, FileSpace
from unishard.nvme.rank_file import RankFile
from unishard.nvme.streams import Streams


class MomentsInFile:
    """Lets AdamW of 8 bits step by pieces, whose codes are read before and written afterwards."""

    def __init__(self, optimizer: AdamW8bit) -> None:
        """Lay the codes out; nothing is allocated.

        Args:
            optimizer: Has not stepped yet. Shards on a device come to the host piece by piece, and go back.
        """
        self._optimizer = optimizer
        self._lead: dict[str, int] = {}
        """How many elements of its first block other ranks have, by parameter: pieces are cut where a block ends."""
        self._whole: dict[str, Tensor] = {}
        """The elements with the lead, without memory."""
        for name, held in optimizer.held_8bit():
            self._lead[name] = held.start % BLOCK
            self._whole[name] = torch.empty(self._lead[name] + len(held), device="meta")
        self._space = FileSpace([*self._whole.values()], dict.fromkeys(MOMENTS, torch.uint8))
        self._streams: Streams | None = None

    @property
    def nbytes(self) -> int:
        """Of the codes in the file."""
        return self._space.nbytes

    def put_into(self, file: RankFile, start: int) -> None:
        """Take the bytes of a file from one on, and step by pieces from now on."""
        self._streams = self._space.put_into(file, start)
        self._optimizer.codes_of, self._optimizer.run = self._codes_of, self._run

    def close(self) -> None:
        """End the threads."""
        if self._streams is not None:
            self._streams.close()

    def _codes_of(self, name: str, key: str) -> Tensor:
        return self._space.state(key, self._whole[name])[self._lead[name] :]

    def _run(self, updates: Sequence[Update8bit]) -> None:
        assert self._streams is not None
        by_whole = {self._whole[each.name]: each for each in updates}

        def step(cuts: Sequence[Cut], held: Mapping[str, Tensor]) -> None:
            for whole, start, stop, at in cuts:
                update = by_whole[whole]
                lead = self._lead[update.name]
                first = max(start, lead)
                codes = {key: values[at + first - start : at + stop - start] for key, values in held.items()}
                update.run(first - lead, stop - lead, codes)

        self._streams.move(self._space.cuts([*by_whole]), step)
