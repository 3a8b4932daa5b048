"""What a DeepSpeed engine holds, from its live tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from unishard_deepspeed.private.second_copy import second_shard


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
