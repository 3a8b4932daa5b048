"""Check a value that is to be one number."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from unishard.errors import ContractError


def check_number(call: str, name: str, value: Any) -> None:
    """Check that a value is one number.

    Raises:
        ContractError: It is not.
    """
    if isinstance(value, DTensor):
        raise ContractError(f"{call}: {name} is a DTensor, of which each rank holds a part; pass {name}.full_tensor()")
    if isinstance(value, Tensor) and (value.numel() != 1 or value.is_complex()):
        raise ContractError(
            f"{call}: {name} must be one number, got a tensor of shape {tuple(value.shape)}; pass its mean, "
            f"{name}.mean()"
        )
    if not isinstance(value, Tensor):
        try:
            float(value + 0)  # a text is no number
        except (TypeError, ValueError):
            raise ContractError(f"{call}: {name} must be a number or a tensor with one, got {value!r}") from None
