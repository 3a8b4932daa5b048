"""Compares two checkpoints: their manifests, and their tensors element by element where the hashes differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unishard.checkpoint import manifest as manifests
from unishard.checkpoint.manifest import Manifest, TensorFacts
from unishard.checkpoint.tensor_reader import Tensors
from unishard.checkpoint.verifying import Advance, blocks_of, opened, require_sound
from unishard.errors import CheckpointError

_INCIDENTAL = {"run", "commit", "written", "versions", "files", "tensors", "norms", "crc32"}
"""Fields that depend on when and how the checkpoint was written, or that follow from the tensors."""
_STRIDE = 1 << 19
"""Elements compared at once."""


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
    sides = Tensors(a), Tensors(b)
    return Comparison(
        list(_facts(one, other)),
        [name for name in one.tensors if name not in other.tensors],
        [name for name in other.tensors if name not in one.tensors],
        [
            Fact(name, *forms)
            for name in common
            if len(set(forms := (_form(one.tensors[name]), _form(other.tensors[name])))) > 1
        ],
        [_gap(name, *sides, advance) for name in _changed(one, other)],
        len(common),
    )


def to_read(a: Path, b: Path) -> int:
    """Bytes that a comparison reads: the files of both, and the tensors of A that differ.

    Raises:
        CheckpointError: One of them cannot be read.
    """
    one, other = manifests.read(a), manifests.read(b)
    tensors = opened(a, one)
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
    forms = [(tensor.shape, tensor.dtype) for tensor in (a.lazy(name), b.lazy(name))]
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
