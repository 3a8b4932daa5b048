"""Copies of a parameter that has no data yet are read as the parameter itself is."""

from copy import deepcopy

import torch
from torch import nn

from unishard.contract.kit.materialization import materialize, set_reader


def test_a_copy_of_a_head_as_peft_makes_it_gets_the_data_too() -> None:
    head, values = nn.Linear(3, 2, bias=False, device="meta"), torch.arange(6.0)
    set_reader(head.weight, lambda begin, end: values[begin:end])
    for module in (deepcopy(deepcopy(head)), deepcopy(head), head):
        materialize([module.weight], torch.device("cpu"), lambda weight: range(weight.numel()))
        assert module.weight.flatten().equal(values)
        assert deepcopy(module).weight.equal(module.weight)
