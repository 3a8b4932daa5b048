"""Which modules of a sharded model had only a part of their parameters used; see `unishard_fsdp.cases.parameter_usage`."""

from __future__ import annotations

import torch
from torch import nn

from unishard_fsdp.cases.parameter_usage import ParameterUsage


class Pair(nn.Module):
    """Two layers, the second of which is used where it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, both: bool) -> torch.Tensor:
        out = self.always(torch.ones(2, 3))
        return (self.sometimes(out) if both else out).sum()


def micro_batch(usage: ParameterUsage, model: nn.Module, both: bool) -> list[nn.Module]:
    loss = model(both)
    usage.partly_used()  # as the engine does, before each backward
    loss.backward()
    return usage.partly_used()


def test_a_layer_that_is_left_out_makes_its_module_partly_used_until_the_window_ends() -> None:
    model = Pair()
    usage = ParameterUsage([model])
    assert usage.not_entered() == [model]
    assert micro_batch(usage, model, False) == [model]
    assert usage.not_entered() == []
    assert micro_batch(usage, model, True) == []
    usage.forget()
    assert micro_batch(usage, model, False) == [model]


def test_what_is_unfrozen_later_is_followed_from_then_on() -> None:
    model = Pair()
    model.sometimes.requires_grad_(False)
    usage = ParameterUsage([model])
    assert micro_batch(usage, model, True) == []
    usage.forget()
    model.sometimes.requires_grad_(True)
    assert micro_batch(usage, model, True) == []
    usage.forget()
    assert micro_batch(usage, model, False) == [model]
