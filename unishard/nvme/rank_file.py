"""The file of one rank: it has no name, and parts of it are tensors.

Nobody deletes it: the kernel frees it when the process ends, by `close`, an error or SIGKILL. Its bytes are allocated
before they are used, so a full disk is one error in `prepare`, and never a SIGBUS in a later write to mapped memory.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from unishard.errors import BackendError, ConfigError, Problem
from unishard.nvme.file_systems import file_system_of, in_memory, is_over_network

ALIGNED = 4096
"""Bytes: of what offsets, lengths and addresses are multiples, without which O_DIRECT reads and writes nothing."""
_Call = Callable[[int, list[memoryview], int], int]
_FIELD = "offload.nvme_path"


class RankFile:
    """A file that is allocated once."""

    def __init__(self, directory: Path, rank: int) -> None:
        """Create it.

        Args:
            directory: Created if it is missing.
            rank: Whose it is, for messages.

        Raises:
            ConfigError: The directory cannot be used, or lies in memory.
        """
        self.directory, self._rank = directory, rank
        if not hasattr(os, "posix_fallocate"):
            raise refusal("needs Linux; set offload.params and offload.optimizer to cpu")
        try:
            if problem := in_memory(directory):
                raise refusal(problem)
            directory.mkdir(parents=True, exist_ok=True)
            self.kind = file_system_of(directory)
            """The file system."""
            self._descriptor = _nameless(directory)
        except OSError as error:
            raise refusal(f"{directory} cannot be used: {error.strerror}; name a directory on a disk") from error
        self._direct = _reopened_direct(self._descriptor)
        self.over_network = is_over_network(self.kind)
        """Whether reads and writes leave the node."""
        self.free = shutil.disk_usage(directory).free
        """Bytes, before a rank has allocated any."""
        self._memory = torch.empty(0, dtype=torch.uint8)

    def allocate(self, nbytes: int) -> None:
        """Allocate bytes, which are zero, and map them.

        Raises:
            OSError: There is no room.
        """
        if nbytes:
            os.posix_fallocate(self._descriptor, 0, nbytes)
            name = f"/proc/self/fd/{self._descriptor}"
            self._memory = torch.from_file(name, shared=True, size=nbytes, dtype=torch.uint8)

    def tensor(self, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Elements from a byte on, as a flat tensor, which keeps the file mapped."""
        return self._memory[start : start + numel * dtype.itemsize].view(dtype)

    def read(self, start: int, into: memoryview) -> None:
        """Read into aligned memory, past the page cache where the file system can.

        Raises:
            BackendError: The disk cannot.
        """
        self._move(os.preadv, start, into, "read")

    def write(self, start: int, out: memoryview) -> None:
        """Write aligned memory, past the page cache where the file system can.

        Raises:
            BackendError: The disk cannot.
        """
        self._move(os.pwritev, start, out, "written")

    def _move(self, call: _Call, start: int, memory: memoryview, done: str) -> None:
        descriptor, moved = self._descriptor if self._direct is None else self._direct, 0
        try:
            while moved < len(memory):
                count = call(descriptor, [memory[moved:]], start + moved)
                if not count:
                    raise OSError(0, "it ends too early")
                moved += count
        except OSError as error:
            raise BackendError(
                f"{_FIELD}: the file of rank {self._rank} in {self.directory} cannot be {done}: {error.strerror}; the "
                "optimizer's state is lost: resume from the last checkpoint, with another disk"
            ) from error

    def close(self) -> None:
        """Free the disk once the last tensor in it is gone."""
        for descriptor in (self._descriptor, self._direct):
            if descriptor is not None:
                os.close(descriptor)


def refusal(message: str) -> ConfigError:
    """An error about the directory."""
    return ConfigError([Problem(_FIELD, message)])


def aligned_buffer(nbytes: int) -> tuple[memoryview, Tensor]:
    """Memory for reads and writes, and the same as a tensor of bytes."""
    memory = mmap.mmap(-1, -(-nbytes // ALIGNED) * ALIGNED, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return memoryview(memory), torch.frombuffer(memory, dtype=torch.uint8)


def _nameless(directory: Path) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError:  # some file systems cannot
        descriptor, name = tempfile.mkstemp(dir=directory)
        os.unlink(name)
        return descriptor


def _reopened_direct(descriptor: int) -> int | None:
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_DIRECT)
    except OSError:
        return None
