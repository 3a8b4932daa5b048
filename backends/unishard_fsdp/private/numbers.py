"""Numbers of a sharded weight, such as `float(weight.norm())`."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from unishard_fsdp.private import PRIVATE_API


def read_in_full() -> None:
    """Let a number of a DTensor be that of the full tensor; collective where it is not replicated.

    torch reads it from this rank's part: of a sum that is still to be added up over the ranks, or of a shard
    (torch 2.13, tensor/_sharding_prop.py, `aten._local_scalar_dense`).
    """
    if PRIVATE_API["numbers"].works:
        DTensor._op_dispatcher._custom_op_handlers.setdefault(
            torch.ops.aten._local_scalar_dense.default,
            _number,  # type: ignore[arg-type]  # annotated for another one
        )


def _number(operation: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    with torch.no_grad():
        return args[0].full_tensor().item()
