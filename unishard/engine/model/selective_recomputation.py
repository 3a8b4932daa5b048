"""Selective recomputation: results of products and of fused attention are kept, all others are computed again.

torch refuses a backward that finds a kept result changed in place (2.13, utils/checkpoint.py). Here a forward that
changes one itself, as with `nn.ReLU(inplace=True)` after a linear layer, is recomputed whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from unishard.contract.private_api import CORE_PRIVATE_API
from unishard.distributed.nested_tensors import tensors_in
from unishard.errors import ModelError

KEPT = (
    # Products with weights. Not aten.bmm: scores of an attention that is not fused grow with the square of the sequence
    # length.
    "mm",
    "addmm",
    "_scaled_mm",
    "_grouped_mm",
    "convolution",
    # Fused attention with any kernel.
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
"""Operations of `torch.ops.aten`."""


def contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """What a forward runs in, and its recomputation: `context_fn` of torch's `checkpoint`."""
    CORE_PRIVATE_API["changed-in-place"].require()
    results = _Results()
    forward, again = create_selective_checkpoint_contexts(results.policy)  # type: ignore[no-untyped-call]
    return forward, _Recomputation(results, again)


class _Results:
    """Those that are kept of one forward."""

    def __init__(self) -> None:
        self._memory: set[int] = set()
        self.changed = False
        """Whether the forward has changed one in place."""

    def policy(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Whether the results of an operation are kept; not of what no backward sees."""
        if operation in _kept() and not torch.is_inference_mode_enabled():
            self._memory.update(map(_memory_of, tensors_in(context.op_output)))
            return CheckpointPolicy.MUST_SAVE
        if self._memory and operation._schema.is_mutable:
            self.changed |= any(_memory_of(each) in self._memory for each in _written(operation, args, kwargs))
        return CheckpointPolicy.PREFER_RECOMPUTE


class _Recomputation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds kept results in the place of some operations; of results that were changed, computes all again."""

    def __init__(self, results: _Results, again: TorchDispatchMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results, self._again = results, again

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As the modes of torch."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._results.changed:
            return func(*args, **(kwargs or {}))
        try:
            return self._again.__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "has been mutated" not in str(error):
                raise
            raise ModelError(
                "activation_checkpointing: selective keeps a result of a block that is changed in place behind the "
                "block, as with x.add_(y) on its output; write x + y there, or set activation_checkpointing to full"
            ) from error


def _written(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operation changes."""
    arguments = operation._schema.arguments
    given = chain(zip(arguments, args, strict=False), ((each, kwargs.get(each.name)) for each in arguments))
    for argument, value in given:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(value)


def _memory_of(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


@cache
def _kept() -> frozenset[Any]:
    """The operations in `KEPT` that this torch has."""
    return frozenset(getattr(torch.ops.aten, name).default for name in KEPT if hasattr(torch.ops.aten, name))
