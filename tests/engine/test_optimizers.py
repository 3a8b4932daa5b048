"""The optimizer of the config, and what is refused of a caller's factory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from unishard.config import Optimizer
from unishard.engine.optimizers import checked, factory
from unishard.errors import ConfigError

PARAMETERS = [nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))]


def test_the_config_s_own() -> None:
    adamw = factory(Optimizer(lr=0.1, betas=(0.5, 0.6), eps=1e-3, weight_decay=0.2))(PARAMETERS)
    assert type(adamw) is torch.optim.AdamW
    wanted = {"lr": 0.1, "betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": 0.2, "fused": True}
    assert wanted.items() <= adamw.param_groups[0].items()
    sgd = factory(Optimizer.model_validate({"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.2}))(iter(PARAMETERS))
    assert type(sgd) is torch.optim.SGD
    assert {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.2, "fused": True}.items() <= sgd.param_groups[0].items()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda params: None, "factory returned NoneType; it must return a torch.optim.Optimizer"),
        (lambda params: torch.optim.SGD([params[0]], lr=1.0), r"factory left out 1 of 2 trainable parameters; freeze those"),
        (
            lambda params: torch.optim.SGD([*params, nn.Parameter(torch.zeros(1))], lr=1.0),
            "factory took 1 parameters that it was not given",
        ),
        (lambda params: torch.optim.Adafactor(params), "Adafactor works on whole tensors, and each rank holds a part; choose no_shard"),
        (lambda params: torch.optim.LBFGS(params), "LBFGS works on whole tensors"),
    ],
    ids=["nothing", "too few", "foreign", "factored", "line search"],
)
def test_refused(build: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"optimizer: {message}"):
        checked(build, sharded=True)(PARAMETERS)


def test_an_optimizer_is_no_factory() -> None:
    with pytest.raises(ConfigError, match="optimizer: is a SGD; pass a function that builds one, such as lambda params"):
        checked(torch.optim.SGD(PARAMETERS, lr=1.0), sharded=False)  # type: ignore[arg-type]


def test_whole_tensors_may_be_factored() -> None:
    assert type(checked(torch.optim.Adafactor, sharded=False)(PARAMETERS)) is torch.optim.Adafactor
