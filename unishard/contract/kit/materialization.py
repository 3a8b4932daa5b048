"""Give tensors on the meta device their data: a model may be complete only on rank 0, or have only functions that read
it.

A meta parameter gets the data of rank 0's parameter with the same name, or of the function set by `set_reader`: where
the engine keeps only a part of it on each rank, every rank reads its own part; else rank 0 reads all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from unishard.contract.kit.shared_memory import shared_memory
from unishard.distributed.broadcast import broadcast
from unishard.distributed.slices import Slice, slice_of
from unishard.errors import ModelError

Reader = Callable[[int, int], Tensor]
"""Reads the elements between two offsets of the flattened parameter: flat, on the CPU."""

_LARGE_BYTES = 2**20

_READER = "_unishard_reader"
"""An attribute of the parameter, not a table by name: wrappers such as PEFT keep parameters but rename them."""
_FULL = "_unishard_full"
_COPY = "__deepcopy__"
"""Of the parameter itself: that of its class copies no attributes."""


def set_reader(parameter: nn.Parameter, read: Reader) -> None:
    """Set the function that reads the data of a meta parameter.

    Args:
        parameter: A parameter on the meta device; has a reader on all ranks, or on none.
        read: Called once, on rank 0 with all elements, or on every rank with those that it keeps; once more for each
            deep copy, such as those of peft's `modules_to_save`.
    """
    setattr(parameter, _READER, read)
    setattr(parameter, _COPY, partial(_copied, parameter))


def _copied(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    copy: nn.Parameter = type(parameter).__deepcopy__(parameter, memo)  # type: ignore[no-untyped-call]
    set_reader(copy, getattr(parameter, _READER))
    return copy


def take_reader(parameter: Tensor) -> Reader | None:
    """The function that was set, for the caller to use instead of `materialize`; None if there is none."""
    vars(parameter).pop(_COPY, None)
    reader: Reader | None = vars(parameter).pop(_READER, None)
    return reader


def set_full(parameter: nn.Parameter, full: Tensor) -> None:
    """Keep the full tensor of which a parameter is a slice, for `materialize`."""
    setattr(parameter, _FULL, full)


def take_full(parameter: Tensor) -> Tensor | None:
    """The tensor that was kept; None if there is none."""
    full: Tensor | None = vars(parameter).pop(_FULL, None)
    return full


def check(model: nn.Module, *, train: bool) -> None:
    """Check that rank 0 has the data of every parameter and buffer, or can read it. Collective.

    Args:
        model: Not sharded yet.
        train: Whether it is trained: parameters then need memory of their own.

    Raises:
        ModelError: On every rank.
    """
    problems = chain(_without_data(model), (*shared_memory(model), *_without_graph(model)) if train else ())
    problem: list[Any] = [next(problems, None) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(problem, src=0)
    if problem[0]:
        raise ModelError(problem[0])


def _without_graph(model: nn.Module) -> Iterator[str]:
    for name, parameter in model.named_parameters():
        if parameter.is_inference():
            yield (
                f"parameter {name} of {type(model).__name__} was made in torch.inference_mode(), and no backward can "
                "use it; build the model outside that block, or in torch.no_grad()"
            )


def _without_data(model: nn.Module) -> Iterator[str]:
    kind = type(model).__name__
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if (
            isinstance(tensor, UninitializedParameter | UninitializedBuffer)
            or not tensor.is_meta
            or hasattr(tensor, _READER)
        ):
            continue
        role = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        yield (
            f"{role} {name} of {kind} is on the meta device and has no data; build the model on the CPU, inside "
            "unishard.init(cfg), or with unishard.from_pretrained; to add modules to a pretrained model (adapters, "
            "new heads), build all of it inside unishard.init(cfg) instead, or, to quantize it, with a "
            "quantization_config of transformers outside, without quantization in the config"
        )


@torch.no_grad()
def materialize(
    tensors: Iterable[Tensor], device: torch.device, kept: Callable[[Tensor], range] | None = None
) -> list[Tensor]:
    """Move tensors to a device in place, and allocate those on the meta device. Collective if some are slices.

    Args:
        tensors: Parameters and buffers.
        device: Where this rank computes.
        kept: The elements that this rank keeps of a parameter. One with a reader then has only these; the others are
            uninitialized.

    Returns:
        Those of the tensors to broadcast from rank 0 next; the others have what this rank keeps.
    """
    pending = []
    for tensor in tensors:
        read, part = take_reader(tensor), slice_of(tensor)
        if part is not None and read is None:
            _receive(tensor, part, device)
            continue
        if read is None or (kept is None and part is None):
            pending.append(tensor)
        if read is None and not tensor.is_meta:
            tensor.data = tensor.data.to(device)
            continue
        replace_data(tensor, _empty(tensor, device))
        if kept is not None:
            own = kept(tensor)
        else:
            own = range(tensor.numel() if part is not None or dist.get_rank() == 0 else 0)
        if read is not None and own:
            tensor.data.view(-1)[own.start : own.stop].copy_(read(own.start, own.stop))
    return pending


def _receive(tensor: Tensor, part: Slice, device: torch.device) -> None:
    """Give a slice its part of rank 0's full tensor. Collective."""
    full = take_full(tensor)
    own = _empty(tensor, device)
    for number in range(part.of):
        values = own if number == part.number else torch.empty_like(own)
        if full is not None and dist.get_rank() == 0:
            values.copy_(part._replace(number=number).cut(full))
        broadcast([values])
    replace_data(tensor, own)


def _empty(like: Tensor, device: torch.device) -> Tensor:
    """Allocate memory for a tensor of this shape and dtype.

    Large tensors in host memory get their own pages, which are returned to the system when the tensor is freed; glibc
    would keep fragments of them between the shards made from them.
    """
    if device.type != "cpu" or like.nbytes < _LARGE_BYTES:
        return torch.empty(like.shape, dtype=like.dtype, device=device)
    return torch.frombuffer(mmap(-1, like.nbytes, flags=MAP_PRIVATE | MAP_ANONYMOUS), dtype=like.dtype).view(like.shape)


def use_placeholders(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Replace meta tensors by expanded scalars on a device, for code that only reads their device and shape.

    Allocates no memory.

    They must still be materialized and then overwritten with rank 0's values.

    Args:
        tensors: Parameters and buffers; those with data stay as they are.
        device: Where this rank computes.
    """
    for tensor in tensors:
        if tensor.is_meta:
            replace_data(tensor, torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape))


@torch.no_grad()
def replace_data(tensor: Tensor, data: Tensor) -> None:
    """Replace a tensor's data, also with data on another type of device, which assigning to `tensor.data` cannot do.

    The tensor stays the same object under all its names, and keeps its attributes.

    Args:
        tensor: A parameter or buffer.
        data: Data of the same shape and dtype.

    Raises:
        RuntimeError: There is a weak reference to the tensor.
    """
    if tensor.device.type == data.device.type:
        tensor.data = data
        return
    replacement = nn.Parameter(data, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data
    vars(replacement).update(vars(tensor))
    torch.utils.swap_tensors(tensor, replacement)  # type: ignore[no-untyped-call]
