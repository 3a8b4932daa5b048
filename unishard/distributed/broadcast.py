"""Makes tensors equal on all ranks.

All ranks start from rank 0's model: FSDP2 sends nothing and DeepSpeed no buffers, so other seeds would train a chimera.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from unishard.distributed.shards import flat

_BUCKET_BYTES = 8 * 2**20
_LARGE_BYTES = 2**20


def broadcast(tensors: Iterable[Tensor]) -> None:
    """Overwrite tensors with rank 0's, large ones in place, many small ones in one collective. Collective.

    Args:
        tensors: The same shapes, dtypes, order and device on every rank. Costs up to 8 MiB beside them.
    """
    tensors = list(tensors)
    make_dense(
        tensor for tensor in tensors if 0 in tensor.stride()
    )  # expanded: several elements in one place, which cannot be written
    if dist.get_world_size() == 1:
        return
    with torch.no_grad():
        make_dense(tensor for tensor in tensors if tensor.nbytes >= _LARGE_BYTES)
        large = [tensor for tensor in tensors if tensor.nbytes >= _LARGE_BYTES]
        for tensor in large:
            dist.broadcast(tensor.detach().view(-1).view(torch.uint8), src=0)
        for bucket in _buckets(tensor for tensor in tensors if tensor.nbytes < _LARGE_BYTES):
            joined = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
            dist.broadcast(joined.view(torch.uint8), src=0)  # as bytes: a backend need not know the dtype
            if dist.get_rank() == 0:
                continue
            for tensor, piece in zip(bucket, torch.split(joined, [tensor.numel() for tensor in bucket]), strict=True):
                tensor.detach().copy_(piece.view(tensor.shape))


_REDUCED = {"min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


def reduce(tensors: Iterable[Tensor], how: str) -> None:
    """Overwrite tensors with their mean, sum, minimum or maximum over the ranks, in place. Collective.

    Args:
        tensors: The same shapes, dtypes, order and device on every rank; a mean is one of floating-point numbers.
        how: `mean`, `sum`, `min` or `max`. Computed in fp32, fp64 or int64.
    """
    if dist.get_world_size() == 1:
        return
    with torch.no_grad():
        for bucket in _buckets(tensors):
            joined = torch.cat([tensor.detach().reshape(-1).to(wide(tensor.dtype)) for tensor in bucket])
            dist.all_reduce(joined, op=_REDUCED.get(how, dist.ReduceOp.SUM))
            if how == "mean":
                joined /= dist.get_world_size()
            for tensor, piece in zip(bucket, torch.split(joined, [tensor.numel() for tensor in bucket]), strict=True):
                tensor.detach().copy_(piece.view(tensor.shape))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of a dtype are added."""
    if not dtype.is_floating_point:
        return torch.int64
    return torch.float64 if dtype == torch.float64 else torch.float32


def make_dense(tensors: Iterable[Tensor]) -> None:
    """Lay elements out in order, each in a place of its own: engines send the memory of a tensor as it is.

    Args:
        tensors: Keep their memory if they are like that already; else they get their own.
    """
    for tensor in tensors:
        in_order = tensor.is_contiguous() and tensor.stride()[-1:] in ((), (1,))
        if not in_order or tensor.is_conj() or tensor.is_neg():
            tensor.data = flat(tensor.data).view(tensor.shape)


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Lists of tensors of one dtype, each list at most `_BUCKET_BYTES` in all; empty tensors are left out."""
    filling: dict[torch.dtype, list[Tensor]] = {}
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        if sizes.get(tensor.dtype, 0) + tensor.nbytes > _BUCKET_BYTES and filling.get(tensor.dtype):
            yield filling.pop(tensor.dtype)
            sizes[tensor.dtype] = 0
        filling.setdefault(tensor.dtype, []).append(tensor)
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    yield from filling.values()
