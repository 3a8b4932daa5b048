"""Two tensors over the same memory are found, whatever part they share, and slices that lie beside each other are
not."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from unishard.contract.kit.shared_memory import shared_memory


def pair(one: torch.Tensor, other: torch.Tensor, *, trains: bool = True) -> nn.Module:
    model = nn.Module()
    model.one, model.other = nn.Parameter(one, requires_grad=trains), nn.Parameter(other, requires_grad=False)
    return model


def viewed() -> nn.Module:
    model = nn.Linear(3, 2)
    model.register_buffer("row", model.weight.detach()[0])
    return model


FLAT = torch.randn(12)
TABLE = torch.randn(3, 4)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: pair(TABLE, TABLE.t()),
            "parameters one and other of Module share memory .*; tie them by one object, other = one; for a",
        ),
        (lambda: pair(FLAT[:8], FLAT[7:]), "parameters one and other"),
        (lambda: pair(TABLE, TABLE.view(torch.int32)), "parameters one and other"),
        (lambda: pair(FLAT, FLAT.view(torch.bfloat16)), "parameters one and other"),
        (lambda: pair(FLAT[3:4].expand(5), FLAT), "parameters one and other"),
        (viewed, "buffer row of Linear shares memory with parameter weight, .*register a copy, weight.detach"),
    ],
    ids=["transposed", "overlapping", "another dtype", "another size", "expanded", "buffer"],
)
def test_refused(model: Callable[[], nn.Module], message: str) -> None:
    (found,) = shared_memory(model())
    assert re.search(message, found)


@pytest.mark.parametrize(
    "model",
    [
        pair(FLAT[:6], FLAT[6:]),
        pair(TABLE[:, :2], TABLE[:, 2:]),
        pair(TABLE, TABLE.t(), trains=False),
        pair(TABLE.to("meta"), TABLE.to("meta")),
        pair(FLAT[:0], FLAT),
        nn.LazyLinear(2),
    ],
    ids=["halves", "columns", "frozen", "meta", "empty", "lazy"],
)
def test_allowed(model: nn.Module) -> None:
    assert not list(shared_memory(model))
