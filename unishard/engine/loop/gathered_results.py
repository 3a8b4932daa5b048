"""Gather the ranks' results: tensors of unequal length, and lists of plain values, in nested containers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from unishard.distributed.dtypes import name_of
from unishard.errors import ContractError


def leaves_of(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Tensors, and lists with one plain value per sample, each with its path: `logits`, `spans[1]`.

    Raises:
        ContractError: The data contains something else.
    """
    if isinstance(data, Tensor) or _is_samples(data):
        yield path, data
    elif isinstance(data, Mapping):
        for key, value in data.items():
            yield from leaves_of(value, f"{path}.{key}" if path else str(key))
    elif isinstance(data, list | tuple):
        for index, value in enumerate(data):
            yield from leaves_of(value, f"{path}[{index}]")
    else:
        raise ContractError(
            "gather_for_metrics takes tensors and lists of strings or numbers, in dicts, lists and tuples, but "
            f"{path or 'it'} is a {type(data).__name__}; make it a tensor, or a list with one entry per sample"
        )


def _is_samples(data: Any) -> bool:
    return isinstance(data, list) and all(isinstance(value, str | bytes | int | float) for value in data)


def describe(data: Any, *, padded: bool) -> str:
    """What must be the same on every rank: paths, dtypes, and all sizes except those that may differ."""
    parts = []
    for path, leaf in leaves_of(data):
        if isinstance(leaf, Tensor):
            lengths = ["*"] * leaf.dim() if padded else ["*", *map(str, leaf.shape[1:])][: leaf.dim()]
            parts.append(f"{path or 'tensor'}: {name_of(leaf.dtype)}[{', '.join(lengths)}]")
        else:
            parts.append(f"{path or 'values'}: list")
    return ", ".join(parts)


def gather(data: Any, device: torch.device, pad: float | None, tail: tuple[int, int] | None, sharing: int = 1) -> Any:
    """Concatenate the leaves of all ranks along the first dimension, in rank order, in the same containers. Collective.

    Zero-dimensional tensors become one entry per rank. The structure must be the same on every rank (see `describe`).

    Args:
        data: This rank's data.
        device: A device that the collective supports.
        pad: Fill value for dimensions after the first that differ between ranks.
        tail: Number of samples of all ranks, and how many of them to keep.
        sharing: Neighboring ranks that share samples; the data of the first of them count.

    Raises:
        ContractError: Samples are to be dropped, but a leaf does not have one row per sample.
    """

    def joined(leaf: Any) -> Any:
        tensor = isinstance(leaf, Tensor)
        gathered = _gather_tensor(leaf, device, pad, sharing) if tensor else _gather_list(leaf, sharing)
        if tail is None or (isinstance(leaf, Tensor) and not leaf.dim()):
            return gathered
        samples, real = tail
        if len(gathered) != samples:
            raise ContractError(
                "gather_for_metrics cannot drop the samples that fill up the last batch: it got "
                f"{len(gathered)} rows for {samples} samples; pass one row per sample"
            )
        return gathered[:real]

    return _mapped(data, joined)


def _mapped(data: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(data, Tensor) or _is_samples(data):
        return change(data)
    if isinstance(data, Mapping):
        return {key: _mapped(value, change) for key, value in data.items()}
    make = getattr(type(data), "_make", type(data))  # a named tuple takes its fields one by one
    return make([_mapped(value, change) for value in data])


def has_rows(data: Any, rows: int) -> bool:
    """Whether anything in gathered data has so many rows."""
    return any(len(leaf) == rows for _, leaf in leaves_of(data))


def _gather_list(values: list[Any], sharing: int) -> list[Any]:
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, values)
    return [value for theirs in everyones[::sharing] for value in theirs]


def _gather_tensor(tensor: Tensor, device: torch.device, pad: float | None, sharing: int) -> Tensor:
    origin, tensor = tensor.device, tensor.detach().to(device)
    if not tensor.dim():
        tensor = tensor[None]
    shape = torch.tensor(tensor.shape, device=device)
    shapes = [torch.empty_like(shape) for _ in range(dist.get_world_size())]
    dist.all_gather(shapes, shape)
    lengths = [theirs.tolist() for theirs in shapes]
    largest = [max(sizes) for sizes in zip(*lengths, strict=True)]
    wide = _filled(tensor, [tensor.shape[0], *largest[1:]], pad)
    flat = _filled(wide, largest, 0).contiguous().view(-1)
    if not flat.numel():
        return wide.new_empty([sum(theirs[0] for theirs in lengths[::sharing]), *largest[1:]]).to(origin)
    mine = flat.view(torch.uint8)  # as bytes: the backend need not support the dtype
    everyones = [torch.empty_like(mine) for _ in lengths]
    dist.all_gather(everyones, mine)
    counted = [*zip(everyones, lengths, strict=True)][::sharing]
    parts = [theirs.view(flat.dtype).view(largest)[: sizes[0]] for theirs, sizes in counted]
    return torch.cat(parts).to(origin)


def _filled(tensor: Tensor, shape: list[int], value: float | None) -> Tensor:
    """Pad the tensor at the end of each dimension."""
    missing = [wanted - there for wanted, there in zip(shape, tensor.shape, strict=True)]
    if not any(missing):
        return tensor
    return functional.pad(tensor, [part for more in reversed(missing) for part in (0, more)], value=value)
