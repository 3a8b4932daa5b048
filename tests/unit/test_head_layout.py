"""How a declaration by heads is read, and what it says where it is wrong."""

import pytest
import torch

import unishard
from unishard.errors import ContractError, ModelError
from unishard.sequence.head_layout import DeclaredFunction, as_heads


def function(x, decay=None, weight=None):
    return x


READ = "x: b l h d, decay: b l, weight: h -> b l h d"
WRONG = {
    "x: b l h d": "write name: letters",
    "x: b l hd -> b l h d": "write name: letters",
    "y: b l h d -> b l h d": "y is no parameter of it (x, decay, weight)",
    "x: b l h d -> b l d": "the result needs",
    "x: b l h h -> b l h d": "x may have a letter once",
    "x: l h d -> b l h d": "needs b where it has l",
    "x: b l g d -> b l h d": "one tensor needs",
}


@pytest.mark.parametrize("layout", WRONG)
def test_a_layout_that_cannot_be_read_says_why(layout):
    with pytest.raises(ContractError) as raised:
        unishard.by_heads(layout)(function)
    assert WRONG[layout] in str(raised.value)
    assert "by_heads of function" in str(raised.value)


def test_tensors_that_are_laid_out_in_another_way_are_named():
    declared = DeclaredFunction(function, READ)
    tensors = declared.tensors((torch.zeros(2, 6, 4, 3),), {"decay": torch.zeros(2, 6), "weight": torch.zeros(5)})
    with pytest.raises(ModelError, match=r"function, declared by unishard.by_heads: weight is \[5\], and not h"):
        declared.sizes(tensors, 6)
    with pytest.raises(ModelError, match=r"x is \[2, 6, 4, 3\], and not b l h d \(here .*l = 7"):
        declared.sizes(tensors, 7)


@pytest.mark.parametrize("dimensions", ["b l h d", "b h l", "b l", "h b d l e", "b n l"])
def test_any_layout_becomes_heads_and_positions_and_back(dimensions):
    letters = tuple(dimensions.split())
    tensor = torch.randn([{"b": 2, "l": 5, "h": 3}.get(letter, 4) for letter in letters])
    moved, restore = as_heads(tensor, letters)
    assert moved.shape[:3] == (2, 3 if "h" in letters else 1, 5)
    assert torch.equal(restore(moved), tensor)


def test_without_an_engine_functions_are_plain():
    declared = unishard.by_heads(READ)(function)
    x, taps = torch.randn(2, 6, 4), torch.tensor([[1.0, 0.0, 0.0]]).expand(6, -1)
    assert declared(x) is x
    assert torch.equal(unishard.shift(x, 2), unishard.causal_conv(x.transpose(1, 2).transpose(1, 2).mT, taps[:4]).mT)
    assert torch.equal(unishard.shift(x, 9), torch.zeros_like(x))
