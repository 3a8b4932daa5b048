"""What a DeepSpeed engine holds, from its live tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unishard.distributed.dtypes import name_of
from unishard_deepspeed.inner_optimizer import InnerOptimizer
from unishard_deepspeed.kind import Kind
from unishard_deepspeed.private.second_copy import second_shard


class MasterWeights:
    """Dtypes and number of elements of the master weights on this rank, which do not change."""

    def __init__(self, kind: Kind, inner: InnerOptimizer) -> None:
        masters = _local_shards(inner.trained) if kind == "stage-3" else inner.masters
        self.dtypes = frozenset(name_of(master.dtype) for master in masters)
        self.numel = sum(master.numel() for master in masters)


def _local_shards(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    from deepspeed.utils import safe_get_local_fp32_param

    return [torch.empty_like(safe_get_local_fp32_param(parameter), device="meta") for parameter in parameters]


def units(engine: Any) -> tuple[str, ...]:
    """Names of the modules whose parameters stage 3 gathers together; no other stage reads the flag
    (utils/z3_leaf_module.py).
    """
    if engine.zero_optimization_stage() != 3:
        return ()
    from deepspeed.utils import get_z3_leaf_modules

    leaves = set(get_z3_leaf_modules(engine.module))
    return tuple(name for name, module in engine.module.named_modules() if module in leaves)


def parameter_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of parameters on this rank: gathered ones, its shard, `ds_tensor` (DeepSpeed's page on ZeRO), and of a
    second copy.
    """
    return sum(tensor.numel() * tensor.element_size() for parameter in parameters for tensor in _held(parameter))


def _held(parameter: nn.Parameter) -> Iterator[Tensor]:
    yield parameter.data
    if hasattr(parameter, "ds_tensor"):
        yield parameter.ds_tensor
    if (copy := second_shard(parameter)) is not None:
        yield copy
