"""Models that cannot be sharded are refused before anything is changed, with what to do instead."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from unishard.engine.model.facts import check_model, description_of
from unishard.errors import ModelError


def hooked() -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight.register_hook(lambda gradient: gradient * 2)
    return model


def hooked_after_accumulation() -> nn.Module:
    model = nn.Linear(2, 2)
    model.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.ReLU(), "ReLU has no parameters; there is nothing to train"),
        (nn.Linear(2, 2).requires_grad_(False), "all 2 parameters of Linear are frozen; unfreeze the ones to train"),
        (
            nn.Linear(2, 2).double(),
            "must be fp32, bf16 or fp16, .* weight and 1 others of Linear are torch.float64; call model.float()",
        ),
        (
            nn.LazyLinear(2),
            "parameter weight of LazyLinear has no shape yet .lazy module.; run the model once on a batch",
        ),
        (
            nn.Embedding(3, 2, sparse=True),
            r"the model \(Embedding\) of Embedding has sparse=True, .*; build it with sparse=False",
        ),
        (hooked(), "parameter weight of Linear has a gradient hook, which sharding would lose; remove it"),
        (hooked_after_accumulation(), "parameter bias of Linear has a gradient hook"),
        (
            torch.compile(nn.Linear(2, 2), backend="eager"),
            "already compiled; pass the original module, model._orig_mod",
        ),
    ],
    ids=["none", "frozen", "double", "lazy", "sparse", "hook", "late hook", "compiled"],
)
def test_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        check_model(model)


def test_a_description_is_that_of_what_must_agree() -> None:
    model = nn.BatchNorm1d(2).requires_grad_(False)
    assert description_of(model)["weight"] == "(2,) torch.float32 frozen"
    assert description_of(model)["num_batches_tracked"] == "() torch.int64"
    assert description_of(nn.LazyLinear(2))["weight"] == "uninitialized"
    assert description_of(nn.Linear(1, 1, device="meta"))["weight"] == "(1, 1) torch.float32"
    assert description_of("no module") == {"class of the model": "str"}
