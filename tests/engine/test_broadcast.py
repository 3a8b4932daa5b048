"""What is sent in one collective when all ranks start from rank 0's model."""

from __future__ import annotations

import torch

from unishard.distributed import broadcast


def test_small_tensors_travel_in_buckets_of_one_dtype_and_at_most_the_stated_size():
    sizes = [250_000, 1, 0, 100_000, 249_999] * 20
    tensors = [torch.empty(size, dtype=dtype) for size in sizes for dtype in (torch.float32, torch.int64)]
    buckets = list(broadcast._buckets(tensors))
    assert sorted(id(tensor) for bucket in buckets for tensor in bucket) == sorted(
        id(tensor) for tensor in tensors if tensor.numel()
    )
    for bucket in buckets:
        assert len({tensor.dtype for tensor in bucket}) == 1
        assert sum(tensor.nbytes for tensor in bucket) <= 8 * 2**20, "as the docstring of `broadcast` says"
