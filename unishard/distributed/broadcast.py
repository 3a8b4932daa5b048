"""Makes tensors equal on all ranks.

All ranks start from rank 0's model: FSDP2 sends nothing and DeepSpeed no buffers, so other seeds would train a chimera.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["average", "broadcast"]

_BUCKET_BYTES = 8 * 2**20
_LARGE_BYTES = 2**20


def broadcast(tensors: Iterable[Tensor]) -> None:
    """Overwrite tensors with rank 0's, large ones in place, many small ones in one collective. Collective.

    Args:
        tensors: The same shapes, dtypes, order and device on every rank. Costs up to 8 MiB beside them.
    """
    if dist.get_world_size() == 1:
        return
    tensors = list(tensors)
    with torch.no_grad():
        for tensor in tensors:
            if tensor.nbytes >= _LARGE_BYTES or 0 in tensor.stride():
                # Expanded: several elements in one place, which cannot be written. Otherwise strided: cannot be sent as it is.
                tensor.data = tensor.data.contiguous()
        large = [tensor for tensor in tensors if tensor.nbytes >= _LARGE_BYTES]
        for tensor in large:
            dist.broadcast(tensor.detach().view(-1).view(torch.uint8), src=0)
        for bucket in _buckets(tensor for tensor in tensors if tensor.nbytes < _LARGE_BYTES):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
            dist.broadcast(flat.view(torch.uint8), src=0)  # as bytes: a backend need not know the dtype
            if dist.get_rank() == 0:
                continue
            for tensor, piece in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
                tensor.detach().copy_(piece.view(tensor.shape))


def average(tensors: Iterable[Tensor]) -> None:
    """Overwrite floating-point tensors with their mean over the ranks, computed in fp32 or fp64, in place. Collective.

    Args:
        tensors: The same shapes, dtypes, order and device on every rank.
    """
    if dist.get_world_size() == 1:
        return
    with torch.no_grad():
        for bucket in _buckets(tensors):
            wide = torch.promote_types(bucket[0].dtype, torch.float32)
            flat = torch.cat([tensor.detach().reshape(-1).to(wide) for tensor in bucket])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            for tensor, piece in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
                tensor.detach().copy_(piece.view(tensor.shape))


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
