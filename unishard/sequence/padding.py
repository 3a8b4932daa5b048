"""What the tensors of a batch are padded with, so that no padding trains."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from unishard.errors import DataError

IGNORED = -100
"""The label that the losses of transformers and torch leave out."""
_TARGETS = re.compile(r"label|target|^y$")
_INPUTS = re.compile(r"(ids|tokens|embeds|inputs?|seq_idx)$|^(idx|x)$")
_COUNTS_NOTHING = re.compile("mask|weight")
_OF_IDS = 2
"""Dimensions of `[batch, sequence]`."""

Path = tuple[str, int]
"""A key of a batch, empty where it has none, and the place of a tensor among those in its value."""


def title_of(path: Path) -> str:
    """A tensor of a batch, in words."""
    name, number = path
    return (f"{name}[{number}]" if number else name) if name else f"tensor {number} of a batch"


def ignored_label(tensor: Tensor) -> int | None:
    """What a loss leaves out of integer targets, which is negative; None if there is no such element."""
    if tensor.is_floating_point() or tensor.dtype == torch.bool or not tensor.numel():
        return None
    least = int(tensor.min())
    return least if least < 0 else None


def fills_of(tensors: Mapping[Path, Tensor], multiple: int) -> dict[Path, int]:
    """What each tensor is padded with: 0, and integer targets with the label that is ignored.

    Targets are known by their names, by labels that are ignored, or because they are another tensor of the batch moved
    by one position; inputs by their names, or because nothing else is left.

    Args:
        tensors: Those that are as long as the sequence, `[batch, sequence, ...]`.
        multiple: What the length must be a multiple of.

    Raises:
        DataError: What one of them is cannot be told, or it has targets for which no value says that they are padding.
    """
    shifted = _shifted(tensors)
    fills = {path: _known_fill(path, tensor, shifted, multiple) for path, tensor in tensors.items()}
    unknown = [path for path, fill in fills.items() if fill is None]
    has_inputs = any(fill == 0 and not _COUNTS_NOTHING.search(path[0]) for path, fill in fills.items())
    if unknown and (has_inputs or len(unknown) > 1):
        raise DataError(
            f"{title_of(unknown[-1])} has {tensors[unknown[-1]].shape[1]} positions, no multiple of {multiple}, and "
            "parallel.sequence cannot tell whether they are inputs or targets, whose padding must not train; pad the "
            f"batch to a multiple of {multiple}, or name its keys: input_ids or inputs, and labels or targets, which "
            "get -100"
        )
    return {path: fill or 0 for path, fill in fills.items()}


def _known_fill(path: Path, tensor: Tensor, shifted: Mapping[Path, Path], multiple: int) -> int | None:
    name = path[0].lower()
    if _TARGETS.search(name) and not _COUNTS_NOTHING.search(name):
        if tensor.is_floating_point():
            raise DataError(
                f"{title_of(path)} has {tensor.shape[1]} positions, no multiple of {multiple}, and no value of targets "
                f"in floating point says that they are padding; pad the batch to a multiple of {multiple}, and leave "
                "the padding out of the loss"
            )
        return ignored_label(tensor) or IGNORED
    if tensor.dtype == torch.bool or _COUNTS_NOTHING.search(name) or _INPUTS.search(name) or path in shifted.values():
        return 0
    return IGNORED if path in shifted and ignored_label(tensor) is None else ignored_label(tensor)


def _shifted(tensors: Mapping[Path, Tensor]) -> dict[Path, Path]:
    """Integer tensors whose positions are the next ones of another."""
    integers = {path: each for path, each in tensors.items() if not each.is_floating_point() and each.dim() == _OF_IDS}
    return {
        path: other
        for path, targets in integers.items()
        for other, ids in integers.items()
        if other != path and targets.shape == ids.shape and _is_next(targets[:, :-1], ids[:, 1:])
    }


def _is_next(targets: Tensor, following: Tensor) -> bool:
    counted = targets >= 0
    return bool(counted.any()) and bool(((targets == following) | ~counted).all())
