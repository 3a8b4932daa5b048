"""Find parameters that share memory with another tensor of the model although they are another object.

In plain torch they train as one: `decoder.weight = nn.Parameter(encoder.weight.t())`. Engines move each parameter to
memory of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter


def shared_memory(model: nn.Module) -> Iterator[str]:
    """Yield the trainable parameters that share elements with another parameter or buffer, and how to write that
    instead.

    Frozen ones stay equal without sharing. Slices of one flat tensor may lie beside each other.
    """
    by_storage: dict[tuple[str, int], list[tuple[str, Tensor]]] = defaultdict(list)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if (
            isinstance(tensor, UninitializedParameter | UninitializedBuffer)
            or tensor.layout != torch.strided
            or not tensor.numel()
        ):
            continue
        if address := tensor.untyped_storage().data_ptr():  # 0 on the meta device
            by_storage[str(tensor.device), address].append((name, tensor))
    kind = type(model).__name__
    for tensors in by_storage.values():
        for (first_name, first), (second_name, second) in combinations(tensors, 2):
            if (first.requires_grad or second.requires_grad) and _overlap(first, second):
                yield _refusal(kind, first_name, second_name, buffer=not isinstance(second, nn.Parameter))


def _overlap(tensor: Tensor, partner: Tensor) -> bool:
    """Whether two tensors of one storage have an element in common."""
    (begin, end), (start, stop) = _span(tensor), _span(partner)
    first, last = max(begin, start), min(end, stop)
    if first >= last:
        return False
    if tensor.element_size() != partner.element_size() or (tensor.is_contiguous() and partner.is_contiguous()):
        return True
    size, lowest = tensor.element_size(), min(begin, start)
    seen = torch.zeros((max(end, stop) - lowest) // size, dtype=torch.bool)
    rows = [
        length if step else 1 for length, step in zip(tensor.shape, tensor.stride(), strict=True)
    ]  # an expanded dim repeats one element
    torch.as_strided(seen, rows, tensor.stride(), (begin - lowest) // size).fill_(True)
    return bool(torch.as_strided(seen, partner.shape, partner.stride(), (start - lowest) // size).any())


def _span(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage from a tensor's first element to its last."""
    length = 1 + sum((size - 1) * int(step) for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = int(tensor.storage_offset()) * tensor.element_size()
    return begin, begin + length * tensor.element_size()


def _refusal(kind: str, first: str, second: str, *, buffer: bool) -> str:
    if buffer:
        return (
            f"buffer {second} of {kind} shares memory with parameter {first}, and would keep the old values when the "
            "parameter trains; "
            f"compute it from the parameter in the forward, or register a copy, {first}.detach().clone()"
        )
    return (
        f"parameters {first} and {second} of {kind} share memory but are two objects, which engines would train apart; "
        f"tie them by one object, {second} = {first}; for a transpose or a slice, keep only {first} and compute with "
        f"it in the forward, such as F.linear(x, {first}.t())"
    )
