"""Build the optimizer from the config or a caller's function, or move a caller's optimizer to the sharded
parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unishard import config
from unishard.contract.backend import OptimizerBuilder, OptimizerFactory
from unishard.contract.kit.parameter_groups import groups_of, without_match
from unishard.distributed.nested_optimizers import groups_in, optimizers_in
from unishard.engine.optim.eight_bit import adamw_8bit_of, follow_overrides, is_adamw_8bit, problems_of
from unishard.engine.optim.matrices import muon_of
from unishard.errors import ConfigError, Problem

_PACKAGES = {"lion": ("lion_pytorch", "optimizers"), "adamw_8bit": ("bitsandbytes", "adamw8bit")}
"""Of optimizers that are not torch's: the package, and the extra that installs it."""

_logger = logging.getLogger("unishard")


def factory(cfg: config.Optimizer, model: nn.Module, matrices: Collection[str] = ()) -> OptimizerBuilder:
    """Make a builder of the optimizer in the config.

    Uses torch's fused kernels where they exist for CPU and CUDA.

    Args:
        cfg: The section `optimizer`.
        model: Not sharded yet; its parameter names are matched with the patterns in `cfg`.
        matrices: Names of the parameters that are updated as matrices.

    Raises:
        ConfigError: A pattern matches nothing, see `groups_of`, or the optimizer's package is not installed.
    """
    named = dict(model.named_parameters())
    trainable = [name for name, parameter in named.items() if parameter.requires_grad]
    frozen = named.keys() - set(trainable)
    groups = groups_of(cfg, trainable, frozen, matrices)
    for problem in without_match(cfg, trainable, frozen) if not dist.is_initialized() or dist.get_rank() == 0 else ():
        _logger.warning("%s (the others are used)", problem)
    require_package(cfg)

    def build(named: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        found = dict(named)
        sections: list[dict[str, Any]] = [
            {"params": [found[name] for name in group.names], "lr": group.lr, "weight_decay": group.weight_decay}
            | ({"matrices": group.matrices} if matrices else {})
            for group in groups
        ]
        return _new(cfg, sections, fuses=all(each.dtype == torch.float32 for each in found.values()))

    return build


def require_package(cfg: config.Optimizer) -> None:
    """Check that the optimizer's package is installed.

    Raises:
        ConfigError: It is not.
    """
    if cfg.name not in _PACKAGES:
        return
    package, extra = _PACKAGES[cfg.name]
    if find_spec(package) is None:
        what = f"{cfg.name} needs a package that is not installed; pip install 'unishard[{extra}]'"
        raise ConfigError([Problem("optimizer.name", what)])


def _new(cfg: config.Optimizer, groups: list[dict[str, Any]], *, fuses: bool) -> torch.optim.Optimizer:
    """Build an optimizer over these groups.

    Args:
        cfg: Its name and options.
        groups: Parameters, learning rate and weight decay of each.
        fuses: Whether SGD may be fused: not in bf16 or fp16, which it rounds differently.
    """
    match cfg.name:
        case "adamw":
            return torch.optim.AdamW(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, amsgrad=cfg.amsgrad, fused=True)
        case "adam":
            return torch.optim.Adam(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, amsgrad=cfg.amsgrad, fused=True)
        case "sgd":
            # With momentum, the fused kernel fails on a parameter that gets its first gradient later than others (torch
            # 2.13, _fused_sgd).
            fused = fuses and not cfg.momentum
            return torch.optim.SGD(groups, lr=cfg.lr, momentum=cfg.momentum, nesterov=cfg.nesterov, fused=fused)
        case "adagrad":
            return torch.optim.Adagrad(groups, lr=cfg.lr, eps=cfg.eps)
        case "lion":
            from lion_pytorch import Lion

            lion: torch.optim.Optimizer = Lion(groups, lr=cfg.lr, betas=cfg.betas)
            return lion
        case "adamw_8bit":
            return adamw_8bit_of(cfg, groups)
        case "muon":
            return muon_of(cfg, groups)


def from_factory(build: OptimizerFactory) -> OptimizerBuilder:
    """Make a builder from a caller's function, and check the optimizer that it returns.

    Args:
        build: Takes the trainable parameters, without names.
    """
    if not callable(build):
        _refuse(
            f"is a {type(build).__name__}; pass a new torch.optim.Optimizer of model.parameters(), or a function that "
            "builds one, such as lambda params: torch.optim.Adam(params, lr=1e-3)"
        )

    def build_checked(named: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        params = [parameter for _, parameter in named]
        optimizer: object = build(params)
        if not isinstance(optimizer, torch.optim.Optimizer):
            _refuse(f"the function returned {type(optimizer).__name__}; it must return a torch.optim.Optimizer")
        if problem := next(_problems(optimizer), None):
            _refuse(problem)
        given = {id(parameter) for parameter in params}
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if held - given:
            _refuse(
                f"the function added {len(held - given)} parameters that are not in its argument; use only that "
                "argument"
            )
        if given - held:
            _refuse(
                f"the function omitted {len(given - held)} of {len(given)} trainable parameters; freeze those with "
                "requires_grad_(False)"
            )
        return optimizer

    return build_checked


def move_to_shards(optimizer: torch.optim.Optimizer, model: nn.Module) -> OptimizerBuilder:
    """Make a builder that moves a caller's optimizer to the sharded parameters, with its groups and options.

    The object and its group dicts stay the same, so a scheduler on it still writes the live learning rates.

    Args:
        optimizer: An optimizer of the parameters of `model` that has not stepped yet.
        model: Not sharded yet.

    Raises:
        ConfigError: It has state, or its parameters are not the model's trainable ones.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if problem := next(_instance_problems(optimizer, model, names), None):
        _refuse(problem)
    groups = groups_in(optimizer)
    kept = [[(at, names[id(p)]) for at, p in enumerate(group["params"]) if p.requires_grad] for group in groups]

    def move(named: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        found = dict(named)
        follow_overrides(optimizer, {number: found[name] for number, name in names.items() if name in found})
        # Only Adagrad has state before its first step, and recreates it if missing (torch 2.13, optim/adagrad.py).
        for each in optimizers_in(optimizer):
            each.state.clear()
        for group, places in zip(groups, kept, strict=True):
            group["params"] = [found[name] for _, name in places]
            if "param_names" in group:
                group["param_names"] = [group["param_names"][at] for at, _ in places]
            if isinstance(group.get("lr"), Tensor):
                group["lr"] = group["lr"].item()  # schedules write numbers, and DTensors cannot be mixed with tensors
        return optimizer

    return move


def description_of(optimizer: object, model: object) -> dict[str, Any]:
    """Describe what must be equal on all ranks: the class, and each group's parameters and plain options.

    Raises nothing.
    """
    if isinstance(optimizer, torch.optim.Optimizer) and isinstance(model, nn.Module):
        return description_of_built(optimizer, {id(parameter): name for name, parameter in model.named_parameters()})
    return {"optimizer": "that of the config" if optimizer is None else type(optimizer).__name__}


def description_of_built(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """The same of an optimizer.

    Args:
        optimizer: Any.
        names: Names of the parameters, by `id`.
    """
    described: dict[str, Any] = {"optimizer": type(optimizer).__name__}
    for index, group in enumerate(optimizer.param_groups):
        described[f"parameters of group {index}"] = ", ".join(
            names.get(id(parameter), "another") for parameter in group["params"]
        )
        for option, value in group.items():
            plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            if isinstance(plain, int | float | str | tuple | None):
                described[f"{option} of group {index}"] = plain
    return described


def _instance_problems(optimizer: torch.optim.Optimizer, model: nn.Module, names: dict[int, str]) -> Iterator[str]:
    """Yield the problems of a caller's optimizer."""
    kind = type(optimizer).__name__
    yield from _problems(optimizer)
    if any(map(_has_state, optimizers_in(optimizer))):
        yield (
            f"{kind} already has state of {len(optimizer.state)} parameters, which sharding would lose; pass an "
            "optimizer that has not stepped and has no loaded state"
        )
    held = {id(parameter) for group in groups_in(optimizer) for parameter in group["params"]}
    if held - names.keys():
        yield (
            f"{kind} has {len(held - names.keys())} parameters that are not in {type(model).__name__}; create it from "
            "model.parameters() after the last change to the model and before prepare"
        )
    missing = [
        name for name, parameter in model.named_parameters() if parameter.requires_grad and id(parameter) not in held
    ]
    if missing:
        yield (
            f"{kind} lacks {len(missing)} trainable parameters ({', '.join(missing[:3])}); add them to a group, or "
            "freeze them with requires_grad_(False)"
        )
    for index, group in enumerate(optimizer.param_groups):
        if group["params"] and not any(parameter.requires_grad for parameter in group["params"]):
            yield f"group {index} of {kind} has only frozen parameters; remove it"


def _problems(optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """Yield the reasons why an optimizer would not train as in plain torch."""
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        yield "LBFGS recomputes the loss inside step(), which no engine supports; choose another optimizer"
    if is_adamw_8bit(optimizer):
        yield from problems_of(optimizer)
    for option, why in (
        ("differentiable", "there is no backward through an update"),
        ("capturable", "updates are not captured in a CUDA graph"),
    ):
        if any(group.get(option) for group in optimizer.param_groups):
            yield f"{kind} has {option}=True, but {why}; remove it"


def _has_state(optimizer: torch.optim.Optimizer) -> bool:
    states = [state for state in optimizer.state.values() if any(value is not None for value in state.values())]
    if isinstance(optimizer, torch.optim.Adagrad):
        return any(float(state["step"]) for state in states)
    return bool(states)


def _refuse(what: str) -> NoReturn:
    raise ConfigError([Problem("optimizer", what)])
