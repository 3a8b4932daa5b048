"""Lists of gradients are scaled and measured as torch's own functions over lists do it, to the bit, on every torch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from unishard.contract.kit import grad_norm
from unishard.distributed.shards import Shard, shard_norms
from unishard_fsdp.gradients.clipping import scale

SIZES = (0, 1, 7, 33, 1025, 70_000)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def gradients(dtype):
    return [torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype) for size in SIZES]


def bits(tensors):
    return [tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16).tolist() for tensor in tensors]


@DTYPES
def test_clips_as_torch_does(dtype):
    total, ours, parameters = (
        torch.tensor(7.3),
        gradients(dtype),
        [nn.Parameter(torch.empty_like(each)) for each in gradients(dtype)],
    )
    for parameter, gradient in zip(parameters, gradients(dtype), strict=True):
        parameter.grad = gradient
    scale(ours, total, 0.9, divisor=1)
    nn.utils.clip_grads_with_norm_(parameters, 0.9, total, foreach=True)
    assert bits(ours) == bits(parameter.grad for parameter in parameters)


@DTYPES
def test_divides_each(dtype):
    ours = gradients(dtype)
    grad_norm.divide(ours, 7.123)
    assert bits(ours) == bits(gradient / 7.123 for gradient in gradients(dtype))


@DTYPES
def test_measures_each_in_fp32(dtype):
    parts = {str(values.numel()): Shard(values.shape, values) for values in gradients(dtype)}
    wanted = [torch.linalg.vector_norm(gradient, dtype=torch.float32).item() for gradient in gradients(dtype)]
    assert list(shard_norms(parts, torch.device("cpu")).values()) == wanted


def test_uses_the_public_functions_over_lists_where_torch_has_them(monkeypatch):
    calls = []
    public = SimpleNamespace(
        mul_=lambda *given: calls.append(("mul_", *given)), div_=lambda *given: calls.append(("div_", *given))
    )
    monkeypatch.setattr(grad_norm, "_FOREACH", public)
    given, factor = gradients(torch.float32), torch.tensor(0.5)
    grad_norm.multiply(given, factor)
    grad_norm.divide(given, 3.0)
    grad_norm.multiply([], factor)  # these functions refuse an empty list
    grad_norm.divide([], 3.0)
    assert calls == [("mul_", given, factor), ("div_", given, 3.0)]
