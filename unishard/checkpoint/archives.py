"""Compares the checksums of files of torch.save, which are zip archives; `torch.load` does not (torch 2.13)."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from typing import IO

from unishard.errors import CheckpointError

_BLOCK = 1 << 22
"""Bytes in memory at once."""


def read_through(file: IO[bytes], shown: str) -> Iterator[int]:
    """Read an archive and compare its checksums. An archive may lack them: unishard has its own, of the entire file.

    Args:
        file: The archive, which is at its beginning once all is read.
        shown: What it is, for the message.

    Yields:
        The number of further bytes read.

    Raises:
        CheckpointError: It is damaged, or no such archive.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                if entry.compress_type != zipfile.ZIP_STORED:
                    raise CheckpointError(f"{entry.filename} is compressed, which torch.save never does")
                if entry.CRC:  # 0 where the writer put none
                    with archive.open(entry) as record:
                        while block := record.read(_BLOCK):
                            yield len(block)
        file.seek(0)
    except Exception as error:  # a damaged archive can raise anything
        raise CheckpointError(
            f"{shown}: its checksums do not match ({error}); the file is damaged, use another checkpoint"
        ) from error
