"""Verifies a checkpoint: its files by their checksums, its tensors by their hashes, also while they are read for
something else.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unishard.checkpoint import manifest as manifests
from unishard.checkpoint.files import open_file
from unishard.checkpoint.hashing import MASK, hash_of, hexadecimal
from unishard.checkpoint.manifest import FileFacts, Manifest, TensorFacts
from unishard.checkpoint.tensor_reader import Tensors
from unishard.checkpoint.writing import CHUNK
from unishard.distributed.dtypes import name_of
from unishard.distributed.shards import LazyShard
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


def verified(stretch: LazyShard, folder: Path, name: str, facts: TensorFacts | None) -> LazyShard:
    """A tensor that is verified against its hash once all elements have been read, each once, in any order.

    Args:
        stretch: The tensor.
        folder: The checkpoint directory, for messages.
        name: The tensor's name.
        facts: What the manifest says of it.

    Raises:
        CheckpointError: Its shape or dtype is not that in the manifest; while it is read, its hash.
    """
    if facts is None or (list(stretch.shape), name_of(stretch.dtype)) != (facts.shape, facts.dtype):
        raise CheckpointError(
            f"{folder}: {name} is not what the manifest says; run `unishard checkpoint verify --bits {folder}`"
        )
    seen = so_far = 0

    def read(begin: int, end: int) -> torch.Tensor:
        nonlocal seen, so_far
        values = stretch.read(begin, end)
        if seen < stretch.end:
            seen, so_far = seen + end - begin, (so_far + hash_of(values, begin)) & MASK
            if seen == stretch.end and hexadecimal(so_far) != facts.hash:
                raise CheckpointError(
                    f"{folder}: {name} is damaged: its hash differs from the manifest; use another checkpoint"
                )
        return values

    return stretch._replace(read=read)


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
    stretch = tensors.stretch(name)
    length = max(1, CHUNK // stretch.dtype.itemsize)  # the chunk length used for writing
    for begin in range(0, stretch.end, length):
        yield begin, stretch.read(begin, min(begin + length, stretch.end))


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
    found = hexadecimal(total)
    return None if found == facts.hash else f"has hash {found} instead of {facts.hash}"


# -- Compares two checkpoints: their manifests, and their tensors element by element where the hashes differ --

_INCIDENTAL = {"run", "commit", "written", "versions", "files", "tensors", "norms", "crc32"}
"""Fields that depend on when and how the checkpoint was written, or that follow from the tensors."""
_STRIDE = 1 << 19
"""Elements compared at once."""

"""Called with the number of further bytes read."""


class Fact(NamedTuple):
    """A field that differs between the manifests; None where a manifest lacks it."""

    path: str
    """Dotted, such as `config.training.seed`."""
    a: Any
    b: Any


class TensorDifference(NamedTuple):
    """The difference between two tensors of the same shape."""

    name: str
    differing: int
    """Elements that differ; 0 where only the bits differ, as with 0 and -0."""
    numel: int
    """Elements in the tensor."""
    absolute: float
    """The largest difference; nan where one element is NaN and the other is not."""
    relative: float
    """The largest relative difference of an element, relative to the larger of the two."""


class Comparison(NamedTuple):
    """All differences between two checkpoints."""

    facts: list[Fact]
    only_a: list[str]
    """Tensors that B does not have."""
    only_b: list[str]
    """Tensors that A does not have."""
    forms: list[Fact]
    """Tensors whose shape or dtype differs."""
    values: list[TensorDifference]
    """Tensors of the same shape and dtype whose hash differs."""
    tensors: int
    """Number of tensors that both checkpoints have."""


def compare(a: Path, b: Path, advance: Advance = lambda read: None) -> Comparison:
    """Compare two checkpoints, with one chunk of each in memory at a time. First verifies all files of both.

    Args:
        a: Its directory.
        b: Its directory.
        advance: Called with the progress; the total is `to_read`.

    Raises:
        CheckpointError: One of them cannot be read, or is damaged.
    """
    one, other = manifests.read(a), manifests.read(b)
    for folder, facts in ((a, one), (b, other)):
        require_sound(folder, facts, facts.files, advance)
    common = [name for name in one.tensors if name in other.tensors]
    opened = Tensors(a), Tensors(b)
    return Comparison(
        list(_facts(one, other)),
        [name for name in one.tensors if name not in other.tensors],
        [name for name in other.tensors if name not in one.tensors],
        [
            Fact(name, *forms)
            for name in common
            if len(set(forms := (_form(one.tensors[name]), _form(other.tensors[name])))) > 1
        ],
        [_gap(name, *opened, advance) for name in _changed(one, other)],
        len(common),
    )


def to_read(a: Path, b: Path) -> int:
    """Bytes that a comparison reads: the files of both, and the tensors of A that differ.

    Raises:
        CheckpointError: One of them cannot be read.
    """
    tensors, one, other = Tensors(a), manifests.read(a), manifests.read(b)
    files = sum(facts.bytes for side in (one, other) for facts in side.files.values())
    changed = [name for name in _changed(one, other) if name in tensors]
    return files + sum(tensors.shapes[name].numel() * tensors.dtypes[name].itemsize for name in changed)


def _facts(a: Manifest, b: Manifest) -> Iterator[Fact]:
    sides = [dict(_leaves(side.model_dump(exclude=_INCIDENTAL))) for side in (a, b)]
    for path in dict.fromkeys((*sides[0], *sides[1])):
        one, other = (side.get(path) for side in sides)
        if one != other:
            yield Fact(path, one, other)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    match value:
        case dict() if value:
            items = [(str(key), item) for key, item in value.items()]
        case list() if any(isinstance(item, dict | list) for item in value):
            items = [(str(at), item) for at, item in enumerate(value)]
        case _:
            yield path, value
            return
    for key, item in items:
        yield from _leaves(item, f"{path}.{key}" if path else key)


def _form(facts: TensorFacts) -> str:
    return f"{facts.dtype} {facts.shape}"


def _changed(a: Manifest, b: Manifest) -> list[str]:
    """Tensors with the same shape and dtype in both, and different hashes."""
    return [
        name
        for name, facts in a.tensors.items()
        if (other := b.tensors.get(name)) and _form(facts) == _form(other) and facts.hash != other.hash
    ]


def _gap(name: str, a: Tensors, b: Tensors, advance: Advance) -> TensorDifference:
    forms = [(stretch.shape, stretch.dtype) for stretch in (a.stretch(name), b.stretch(name))]
    if forms[0] != forms[1]:
        raise CheckpointError(
            f"{a.folder}, {b.folder}: {name} differs from the manifest in shape or dtype; run `unishard checkpoint "
            "verify`"
        )
    differing = numel = 0
    largest = torch.zeros(2, dtype=torch.float64)
    for (_, one), (_, other) in zip(blocks_of(a, name), blocks_of(b, name), strict=True):
        for x, y in zip(torch.split(one, _STRIDE), torch.split(other, _STRIDE), strict=True):
            count, gaps = _between(x, y)
            differing, numel = differing + count, numel + x.numel()
            largest = torch.maximum(largest, gaps)  # keeps nan
        advance(one.nbytes)
    return TensorDifference(name, differing, numel, *largest.tolist())


def _between(x: Tensor, y: Tensor) -> tuple[int, Tensor]:
    """How many elements differ, and the largest absolute and relative difference."""
    wide = torch.complex128 if x.is_complex() else torch.float64
    x, y = x.to(wide), y.to(wide)
    apart = ~((x == y) | (x.isnan() & y.isnan()))
    x, y = x[apart], y[apart]
    if not len(x):
        return 0, torch.zeros(2, dtype=torch.float64)
    gap = (x - y).abs()
    relative = gap / torch.maximum(x.abs(), y.abs())
    return len(x), torch.stack([gap.max(), relative.max()])
