"""Gives tensors on the meta device their data: models may come whole on rank 0 alone, or with nothing but a way to read them.

A meta parameter is filled from rank 0's parameter of the same name; on rank 0 itself by the function that `set_reader` gave it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from unishard.errors import ModelError

__all__ = ["become", "check", "materialize", "set_reader", "stand_in"]

_LARGE_BYTES = 2**20

_READER = "_unishard_reader"
"""On the parameter and not in a table by model: what wraps a model, as PEFT does, keeps its parameters and renames them."""


def set_reader(parameter: nn.Parameter, read: Callable[[], Tensor]) -> None:
    """Say where the data of a meta parameter comes from.

    Args:
        parameter: On the meta device.
        read: Returns its data, whole, of the same shape, on the CPU. Called once, on rank 0 alone.
    """
    setattr(parameter, _READER, read)


def check(model: nn.Module) -> None:
    """Check that rank 0 can give every parameter and buffer its data. Collective.

    Raises:
        ModelError: On every rank.
    """
    problem: list[Any] = [next(_without_data(model), None) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(problem, src=0)
    if problem[0]:
        raise ModelError(problem[0])


def _without_data(model: nn.Module) -> Iterator[str]:
    kind = type(model).__name__
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer) or not tensor.is_meta or hasattr(tensor, _READER):
            continue
        what = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        yield (
            f"{what} {name} of {kind} is on the meta device and has no data; build the model on the CPU, inside unishard.init(cfg), "
            "or with unishard.from_pretrained; what is added to a model from unishard.from_pretrained (adapters, new heads) would "
            "need data of its own: build the whole of it inside unishard.init(cfg) instead"
        )


@torch.no_grad()
def materialize(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Bring tensors to a device, each in place.

    Those that were on the meta device hold nothing yet, unless this is rank 0 and they have a reader: rank 0's values must follow by
    broadcast.

    Args:
        tensors: Parameters and buffers.
        device: Where this rank computes.
    """
    for tensor in tensors:
        read = vars(tensor).pop(_READER, None)
        if read is None and not tensor.is_meta:
            tensor.data = tensor.data.to(device)
            continue
        become(tensor, _empty(tensor, device))
        if read is not None and dist.get_rank() == 0:
            tensor.data.copy_(read())


def _empty(like: Tensor, device: torch.device) -> Tensor:
    """Memory for a tensor of this shape and dtype.

    In host memory, large ones are pages of their own, which the system has back as soon as the tensor goes: glibc would keep them, in
    pieces, between the shards that are made of them.
    """
    if device.type != "cpu" or like.nbytes < _LARGE_BYTES:
        return torch.empty(like.shape, dtype=like.dtype, device=device)
    return torch.frombuffer(mmap(-1, like.nbytes, flags=MAP_PRIVATE | MAP_ANONYMOUS), dtype=like.dtype).view(like.shape)


def stand_in(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Take tensors off the meta device without giving them memory, for code that asks their device and shape and nothing more.

    They are still to be materialised and then overwritten by rank 0's.

    Args:
        tensors: Parameters and buffers; those with data are left alone.
        device: Where this rank computes.
    """
    for tensor in tensors:
        if tensor.is_meta:
            become(tensor, torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape))


@torch.no_grad()
def become(tensor: Tensor, data: Tensor) -> None:
    """Give a tensor other data, also on another kind of device, which assigning to `tensor.data` alone cannot.

    It stays the same object under all its names, and keeps its attributes.

    Args:
        tensor: A parameter or buffer.
        data: Of the same shape and dtype.

    Raises:
        RuntimeError: Somebody holds a weak reference to it.
    """
    if tensor.device.type == data.device.type:
        tensor.data = data
        return
    other = nn.Parameter(data, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data
    vars(other).update(vars(tensor))
    torch.utils.swap_tensors(tensor, other)  # type: ignore[no-untyped-call]
