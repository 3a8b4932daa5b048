"""Verifies a checkpoint: its files by their checksums, its tensors by their hashes, also while they are read for
something else.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from unishard.checkpoint import manifest as manifests
from unishard.checkpoint import metadata
from unishard.checkpoint.files import open_file
from unishard.checkpoint.hashing import MASK, hash_of, hexadecimal
from unishard.checkpoint.manifest import FileFacts, Manifest, TensorFacts
from unishard.checkpoint.tensor_reader import Tensors
from unishard.checkpoint.writing import CHUNK
from unishard.distributed.dtypes import name_of
from unishard.distributed.lazy_shards import LazyShard
from unishard.errors import CheckpointError

_BLOCK = 1 << 22
"""Bytes of a file in memory at once."""

Advance = Callable[[int], None]
"""Called with the number of further bytes read."""


def damaged(
    folder: Path, manifest: Manifest, names: Iterable[str] | None = None, advance: Advance = lambda read: None
) -> list[str]:
    """Problems with the files of a checkpoint, one line each: missing, truncated, changed, or not in the manifest.

    Args:
        folder: The checkpoint directory.
        manifest: Its manifest.
        names: Only these files; None for all, and to report files that are not in the manifest.
        advance: Called with the progress; the total is the sum of all sizes in the manifest.
    """
    problems = []
    for name in manifest.files if names is None else names:
        problem = _problem(folder, name, manifest.files.get(name), advance)
        if problem:
            problems.append(f"{folder / name}: {problem}")
    if names is None:
        problems += [
            f"{folder / name}: is not in the manifest" for name in _files(folder) if name not in manifest.files
        ]
    return problems


def require_sound(folder: Path, manifest: Manifest, names: Iterable[str], advance: Advance = lambda read: None) -> None:
    """Check files by their checksums.

    Args:
        folder: The checkpoint directory.
        manifest: Its manifest.
        names: The files to check.
        advance: Called with the progress.

    Raises:
        CheckpointError: One of them is missing or damaged.
    """
    problems = damaged(folder, manifest, names, advance)
    if problems:
        raise CheckpointError(
            f"{folder}: {'; '.join(problems)}; use another checkpoint (unishard checkpoint list {folder.parent})"
        )


def opened(folder: Path, manifest: Manifest) -> Tensors:
    """The tensors of a checkpoint whose index has its checksum: of a damaged pickle the reader may take all memory.

    Raises:
        CheckpointError: The index is missing or damaged.
    """
    require_sound(folder, manifest, [metadata.FILE])
    return Tensors(folder)


def verified(tensor: LazyShard, folder: Path, name: str, facts: TensorFacts | None) -> LazyShard:
    """A tensor that is verified against its hash once all elements have been read, each once, in any order.

    Args:
        tensor: The tensor.
        folder: The checkpoint directory, for messages.
        name: The tensor's name.
        facts: What the manifest says of it.

    Raises:
        CheckpointError: Its shape or dtype is not that in the manifest; while it is read, its hash.
    """
    if facts is None or (list(tensor.shape), name_of(tensor.dtype)) != (facts.shape, facts.dtype):
        raise CheckpointError(
            f"{folder}: {name} is not what the manifest says; run `unishard checkpoint verify --bits {folder}`"
        )
    seen = so_far = 0

    def read(begin: int, end: int) -> torch.Tensor:
        nonlocal seen, so_far
        values = tensor.read(begin, end)
        if seen < tensor.end:
            seen, so_far = seen + end - begin, (so_far + hash_of(values, begin)) & MASK
            if seen == tensor.end and hexadecimal(so_far) != facts.hash:
                raise CheckpointError(
                    f"{folder}: {name} is damaged: its hash differs from the manifest; use another checkpoint"
                )
        return values

    return tensor._replace(read=read)


def hashes_of(folder: Path, manifest: Manifest, advance: Advance = lambda read: None) -> list[str]:
    """Problems with the tensors of a checkpoint, one line each: reads all of them and recomputes their hashes.

    Only one chunk is in memory at a time.

    Args:
        folder: The checkpoint directory.
        manifest: Its manifest.
        advance: Called with the progress.

    Raises:
        CheckpointError: The directory has no index, or a damaged one.
    """
    tensors = Tensors(folder)
    problems = [f"{folder}: {name} is not in the manifest" for name in tensors if name not in manifest.tensors]
    for name, facts in manifest.tensors.items():
        problem = _difference(tensors, name, facts, advance)
        if problem:
            problems.append(f"{folder}: {name} {problem}")
    return problems


def blocks_of(tensors: Tensors, name: str) -> Iterator[tuple[int, torch.Tensor]]:
    """A tensor in blocks aligned to the stored chunks: the offset of each in the flattened tensor, and its elements.

    Raises:
        CheckpointError: There is no such tensor, or a file is missing or damaged.
    """
    tensor = tensors.lazy(name)
    length = max(1, CHUNK // tensor.dtype.itemsize)  # the chunk length used for writing
    for begin in range(0, tensor.end, length):
        yield begin, tensor.read(begin, min(begin + length, tensor.end))


def _problem(folder: Path, name: str, facts: FileFacts | None, advance: Advance) -> str | None:
    path = folder / name
    if facts is None:
        return "is not in the manifest"
    try:
        if not path.resolve().is_relative_to(folder.resolve()):
            return "lies outside the directory; do not trust this checkpoint"
        size = path.stat().st_size
        if size != facts.bytes:
            return f"has {size} bytes instead of {facts.bytes}"
        crc = _crc32(path, advance)
    except RuntimeError:  # Path.resolve, until Python 3.13
        return "is a link in a circle"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if crc == facts.crc32 else f"has CRC-32 {crc} instead of {facts.crc32}"


def _crc32(path: Path, advance: Advance) -> str:
    crc, block = 0, memoryview(bytearray(_BLOCK))
    with open_file(path) as file:
        while count := file.readinto(block):
            crc = zlib.crc32(block[:count], crc)
            advance(count)
    return f"{crc:08x}"


def _files(folder: Path) -> list[str]:
    """All files except the manifest."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    return [name for name in names if name != manifests.FILE]


def _difference(tensors: Tensors, name: str, facts: TensorFacts, advance: Advance) -> str | None:
    if name not in tensors:
        return "is missing"
    shape, dtype = list(tensors.shapes[name]), name_of(tensors.dtypes[name])
    if (shape, dtype) != (facts.shape, facts.dtype):
        return f"is {dtype} {shape} instead of {facts.dtype} {facts.shape}"
    total = 0
    try:
        for begin, values in blocks_of(tensors, name):
            total = (total + hash_of(values, begin)) & MASK
            advance(values.nbytes)
    except CheckpointError as error:
        return f"cannot be read: {error}"
    digest = hexadecimal(total)
    return None if digest == facts.hash else f"has hash {digest} instead of {facts.hash}"


"""Called with the number of further bytes read."""
