"""The optimizer of the config, and what is refused of a caller's factory or object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bitsandbytes
import lion_pytorch
import pytest
import torch
from torch import nn

from unishard.config import Optimizer
from unishard.contract.backend import OptimizerBuilder
from unishard.engine.optim import optimizers
from unishard.engine.optim.optimizers import description_of, factory, from_factory, move_to_shards
from unishard.errors import ConfigError


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))


def built(build: OptimizerBuilder, on: nn.Module) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = build((name, p) for name, p in on.named_parameters() if p.requires_grad)
    return optimizer


@pytest.mark.parametrize(
    ("fields", "kind", "options"),
    [
        (
            {"name": "adamw", "betas": [0.5, 0.6], "eps": 1e-3, "weight_decay": 0.2, "amsgrad": True},
            torch.optim.AdamW,
            {"betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": 0.2, "amsgrad": True, "fused": True},
        ),
        (
            {"name": "adam", "betas": [0.5, 0.6], "eps": 1e-3, "weight_decay": 0.2},
            torch.optim.Adam,
            {
                "betas": (0.5, 0.6),
                "eps": 1e-3,
                "weight_decay": 0.2,
                "amsgrad": False,
                "fused": True,
                "decoupled_weight_decay": False,
            },
        ),
        (
            {"name": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 0.2},
            torch.optim.SGD,
            {"momentum": 0.9, "nesterov": True, "weight_decay": 0.2, "dampening": 0, "fused": False},
        ),
        (
            {"name": "adagrad", "eps": 1e-3, "weight_decay": 0.2},
            torch.optim.Adagrad,
            {"eps": 1e-3, "weight_decay": 0.2, "lr_decay": 0},
        ),
        (
            {"name": "lion", "betas": [0.5, 0.6], "weight_decay": 0.2},
            lion_pytorch.Lion,
            {"betas": (0.5, 0.6), "weight_decay": 0.2},
        ),
        (
            {"name": "adamw_8bit", "betas": [0.5, 0.6], "eps": 1e-3},
            bitsandbytes.optim.AdamW8bit,
            {"betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": 0.01},
        ),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) and "name" in value else "",
)
def test_the_config_s_own(fields: dict[str, Any], kind: type, options: dict[str, Any]) -> None:
    on = model()
    optimizer = built(factory(Optimizer.model_validate({"lr": 0.1, **fields}), on), on)
    assert type(optimizer) is kind
    (group,) = optimizer.param_groups
    assert {"lr": 0.1, **options}.items() <= group.items()
    assert [id(parameter) for parameter in group["params"]] == [id(parameter) for parameter in on.parameters()]


def test_groups_of_the_config() -> None:
    on = model()
    cfg = Optimizer.model_validate(
        {"lr": 0.1, "weight_decay": 0.2, "no_decay": ["bias"], "groups": [{"params": ["^1"], "lr": 0.3}]}
    )
    optimizer = built(factory(cfg, on), on)
    names = {id(parameter): name for name, parameter in on.named_parameters()}
    found = [
        (group["lr"], group["weight_decay"], [names[id(p)] for p in group["params"]])
        for group in optimizer.param_groups
    ]
    assert found == [(0.1, 0.2, ["0.weight"]), (0.1, 0.0, ["0.bias"]), (0.3, 0.2, ["1.weight"]), (0.3, 0.0, ["1.bias"])]


@pytest.mark.parametrize(("name", "extra"), [("lion", "optimizers"), ("adamw_8bit", "adamw8bit")])
def test_an_optimizer_without_its_package(monkeypatch: pytest.MonkeyPatch, name: str, extra: str) -> None:
    monkeypatch.setattr(optimizers, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError,
        match=rf"optimizer\.name: {name} needs a package that is not installed; pip install 'unishard\[{extra}\]'",
    ):
        factory(Optimizer.model_validate({"name": name}), model())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda params: None, "the function returned NoneType; it must return a torch.optim.Optimizer"),
        (
            lambda params: torch.optim.SGD([params[0]], lr=1.0),
            r"the function omitted 3 of 4 trainable parameters; freeze those",
        ),
        (
            lambda params: torch.optim.SGD([*params, nn.Parameter(torch.zeros(1))], lr=1.0),
            "the function added 1 parameters that are not in its argument",
        ),
        (lambda params: torch.optim.LBFGS(params), "LBFGS recomputes the loss inside step"),
        (
            lambda params: torch.optim.SGD(params, lr=1.0, differentiable=True),
            "SGD has differentiable=True, but there is no backward",
        ),
        (
            lambda params: torch.optim.Adam(params, lr=1.0, capturable=True),
            "Adam has capturable=True, but updates are not captured",
        ),
    ],
    ids=["nothing", "too few", "foreign", "line search", "differentiable", "capturable"],
)
def test_refused(build: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"optimizer: {message}"):
        built(from_factory(build), model())


def test_no_factory() -> None:
    with pytest.raises(
        ConfigError, match=r"optimizer: is a str; pass a new torch\.optim\.Optimizer of model\.parameters\(\), or"
    ):
        from_factory("adamw")  # type: ignore[arg-type]


def stepped(on: nn.Module, kind: Any, **options: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = kind(on.parameters(), lr=0.1, **options)
    on(torch.ones(1, 2)).square().sum().backward()
    optimizer.step()
    return optimizer


def loaded(on: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(on.parameters())
    optimizer.load_state_dict(stepped(model(), torch.optim.AdamW).state_dict())
    return optimizer


def partly_frozen(on: nn.Module) -> torch.optim.Optimizer:
    on[1].requires_grad_(False)  # type: ignore[index]
    return torch.optim.SGD([{"params": list(part.parameters())} for part in on.children()], lr=0.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda on: stepped(on, torch.optim.AdamW),
            "AdamW already has state of 4 parameters, which sharding would lose; pass an optimizer that",
        ),
        (lambda on: stepped(on, torch.optim.SGD, momentum=0.9), "SGD already has state of 4 parameters"),
        (lambda on: stepped(on, torch.optim.Adagrad), "Adagrad already has state of 4 parameters"),
        (loaded, "AdamW already has state of 4 parameters"),
        (
            lambda on: torch.optim.SGD(model().parameters(), lr=0.1),
            r"SGD has 4 parameters that are not in Sequential; create it from model.parameters\(\) after the last "
            r"change",
        ),
        (
            lambda on: torch.optim.SGD(on[0].parameters(), lr=0.1),
            r"SGD lacks 2 trainable parameters \(1.weight, 1.bias\); add them to a group, or freeze them with "
            r"requires_grad_\(False\)",
        ),
        (partly_frozen, "group 1 of SGD has only frozen parameters; remove it"),
        (lambda on: torch.optim.Adam(on.parameters(), capturable=True), "Adam has capturable=True"),
    ],
    ids=[
        "stepped",
        "momentum",
        "eager state",
        "loaded",
        "foreign",
        "left out",
        "frozen group",
        "capturable",
    ],
)
def test_an_object_that_cannot_be_moved(make: Callable[[nn.Module], torch.optim.Optimizer], message: str) -> None:
    on = model()
    with pytest.raises(ConfigError, match=f"optimizer: {message}"):
        move_to_shards(make(on), on)


def test_an_object_keeps_its_groups_on_other_parameters() -> None:
    on, after = model(), model()
    named = dict(on.named_parameters())
    on[1].bias.requires_grad_(False)  # type: ignore[union-attr,operator]
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [("1.bias", named["1.bias"]), ("1.weight", named["1.weight"])],
                "lr": torch.tensor(0.25),
                "weight_decay": 0.0,
            },
            {"params": [("0.weight", named["0.weight"]), ("0.bias", named["0.bias"])]},
        ],
        lr=0.5,
        amsgrad=True,
        maximize=True,
    )
    groups = list(optimizer.param_groups)
    build = move_to_shards(optimizer, on)
    assert built(build, after) is optimizer
    assert all(one is other for one, other in zip(optimizer.param_groups, groups, strict=True))
    moved = dict(after.named_parameters())
    assert [[id(p) for p in group["params"]] for group in groups] == [
        [id(moved["1.weight"])],
        [id(moved["0.weight"]), id(moved["0.bias"])],
    ]
    assert [group["param_names"] for group in groups] == [["1.weight"], ["0.weight", "0.bias"]]
    assert [group["lr"] for group in groups] == [0.25, 0.5]
    assert [group["weight_decay"] for group in groups] == [0.0, 0.01]
    assert all(group["amsgrad"] and group["maximize"] for group in groups)


def test_state_before_the_first_step_is_made_anew() -> None:
    on, after = model(), model()
    optimizer = torch.optim.Adagrad(on.parameters(), lr=0.1, initial_accumulator_value=0.5)
    built(move_to_shards(optimizer, on), after)
    after(torch.ones(1, 2)).square().sum().backward()
    gradient = after[0].bias.grad.clone()  # type: ignore[index,union-attr]
    optimizer.step()
    assert set(optimizer.state) == set(after.parameters())
    torch.testing.assert_close(optimizer.state[after[0].bias]["sum"], 0.5 + gradient.square())  # type: ignore[index]


def test_what_ranks_must_agree_on() -> None:
    on = model()
    described = description_of(torch.optim.SGD(on.parameters(), lr=torch.tensor(0.5), momentum=0.9), on)
    wanted = {"optimizer": "SGD", "parameters of group 0": "0.weight, 0.bias, 1.weight, 1.bias", "lr of group 0": 0.5}
    assert wanted.items() <= described.items()
    assert description_of(None, on) == {"optimizer": "that of the config"}
    assert description_of(3, None) == {"optimizer": "int"}


def test_a_pattern_that_only_another_model_has_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    on = nn.Sequential(nn.Linear(2, 2))
    cfg = Optimizer.model_validate({"lr": 0.1, "weight_decay": 0.2, "no_decay": ["bias", "norm"]})
    optimizer = built(factory(cfg, on), on)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]
    assert caplog.messages == [
        "optimizer.no_decay: 'norm' matches no parameter; write part of a name, such as 0.weight, 0.bias (the others "
        "are used)"
    ]
