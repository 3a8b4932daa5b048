"""Modules whose tensors have no data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from unishard.contract.private_api import CORE_PRIVATE_API

_FAKE = CORE_PRIVATE_API["models-without-data"]


@contextmanager
def without_data() -> Iterator[FakeTensorMode]:
    """A block in which modules are built without data, and may be moved and cast.

    `Module.to` swaps such a parameter with the new one, and torch refuses that where weak references to it are left,
    which the mode itself has of every tensor that was cast or initialized in it (torch 2.13, nn/modules/module.py,
    _apply). peft moves each adapter, factories cast models. Here the parameter gets what the new one has: its dtype.
    """
    _FAKE.require()
    swap = torch.utils.swap_tensors
    torch.utils.swap_tensors = _take
    try:
        with FakeTensorMode() as mode:
            yield mode
    finally:
        torch.utils.swap_tensors = swap


def _take(parameter: Tensor, other: Tensor) -> None:
    if parameter.device != other.device:
        raise RuntimeError(f"a model without data is built on one device, and something moves it to {other.device}")
    parameter.data = other.data
