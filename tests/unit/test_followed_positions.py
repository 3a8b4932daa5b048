"""Which module mixes positions, where numbers are rounded in another way in each forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unishard.sequence.followed import Mixing, first_mixing
from unishard.sequence.same_positions import PartOfAll

LENGTH = 16
TOKENS = torch.arange(2 * LENGTH)[None]


class Rounds(nn.Module):
    """Rounds by what else there is, as products over other numbers of tokens."""

    def forward(self, hidden: Tensor) -> Tensor:
        up = (hidden.double().sum() * 1e3).sin() > 0
        return hidden * (1 + torch.finfo(hidden.dtype).eps * up).to(hidden.dtype)


class Routes(nn.Module):
    """Makes another thing of numbers that are as good as equal."""

    def forward(self, hidden: Tensor) -> Tensor:
        return (hidden.double() * 1e9).sin().to(hidden.dtype)


class Previous(nn.Module):
    """Looks at the position before."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + hidden.roll(1, 1)


class Counted(nn.Module):
    """Counts positions from the beginning of what it gets."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.arange(hidden.shape[1])[:, None].to(hidden.dtype)


class Chooses(nn.Module):
    """Has a module that gets some tokens: by chance twice as many of two parts as of one, with other tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.SiLU()

    def forward(self, hidden: Tensor) -> Tensor:
        same = torch.equal(hidden[0, 0], hidden[0, 1])
        self.act(hidden[0, -4 if hidden.shape[1] == LENGTH else -8 if same else -7 :])
        return hidden


def _found(dtype: torch.dtype, *more: nn.Module) -> tuple[Mixing | None, float]:
    """What mixes positions, and how much the model makes of them by what else there is."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), Rounds(), Routes(), Rounds(), Routes(), *more, nn.Linear(8, 8)]
    model = nn.Sequential(nn.Embedding(50, 8), *layers).to(dtype)
    own = TOKENS[:, LENGTH:]
    other = torch.cat([own[:, :1].expand(-1, LENGTH), own], 1)
    probes = (own, TOKENS, other, TOKENS.roll(LENGTH, 1))

    def run(tokens: Tensor) -> Any:
        return lambda: model(tokens)

    with torch.no_grad():
        found = first_mixing(model, [run(each) for each in probes], PartOfAll(1, 2, LENGTH), only_other=False)
        differences = [model(TOKENS)[:, LENGTH:] - made for made in (model(own), model(other)[:, LENGTH:])]
    return found, float(torch.cat(differences).abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_rounded_mixes_nothing_however_much_comes_of_it(dtype: torch.dtype) -> None:
    found, difference = _found(dtype)
    assert found is None
    assert difference > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("module", "counts"), [(Previous(), False), (Counted(), True)], ids=["previous", "counted"])
def test_a_module_is_found_behind_what_is_rounded(dtype: torch.dtype, module: nn.Module, counts: bool) -> None:
    assert _found(dtype, module)[0] == Mixing("6", counts)


def test_tokens_of_an_expert_are_no_positions() -> None:
    assert _found(torch.float32, Chooses())[0] is None
