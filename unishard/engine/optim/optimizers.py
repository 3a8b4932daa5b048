"""Builds the optimizer: that of the config, that of a caller's factory, or the caller's own, moved to the sharded parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unishard import config
from unishard.engine.optim.parameter_groups import groups_of
from unishard.errors import ConfigError, Problem
from unishard.plugins.backend import OptimizerBuilder, OptimizerFactory

__all__ = ["adopt", "checked", "description_of", "factory"]

_WHOLE_TENSORS = (torch.optim.Adafactor, torch.optim.Muon)
"""Their update of one element depends on others of its tensor, so that of a shard would be another (torch 2.13)."""

_NOT_FUSED_ON_SHARDS = (torch.optim.SGD, torch.optim.Adagrad)
"""For whose fused kernel DTensor has no rule ("Operator aten._fused_sgd_.default does not have a sharding strategy", torch 2.13)."""


_NOT_ON_SHARDS = (torch.optim.Rprop,)
"""Whose update DTensor cannot do ("aten.index_put_.default: in-place operations that require placement changes", torch 2.13)."""


def factory(cfg: config.Optimizer, model: nn.Module) -> OptimizerBuilder:
    """A function from named trainable parameters to the optimizer that the config names.

    Fused, which is one kernel a step, where torch has it on CPU and CUDA.

    Args:
        cfg: What to build.
        model: Not sharded yet; the patterns of `cfg` are matched against its names.

    Raises:
        ConfigError: A pattern matches nothing, or the optimizer's package is not installed.
    """
    named = dict(model.named_parameters())
    trainable = [name for name, parameter in named.items() if parameter.requires_grad]
    groups = groups_of(cfg, trainable, named.keys() - set(trainable))
    if cfg.name == "lion" and find_spec("lion_pytorch") is None:
        raise ConfigError([Problem("optimizer.name", "lion needs a package that is not installed; pip install 'unishard[optimizers]'")])

    def build(named: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        found = dict(named)
        sections: list[dict[str, Any]] = [
            {"params": [found[name] for name in group.names], "lr": group.lr, "weight_decay": group.weight_decay} for group in groups
        ]
        return _new(cfg, sections, fuses=not any(isinstance(p, DTensor) or p.dtype != torch.float32 for p in found.values()))

    return build


def _new(cfg: config.Optimizer, groups: list[dict[str, Any]], *, fuses: bool) -> torch.optim.Optimizer:
    """An optimizer over these groups.

    Args:
        cfg: Its name and options.
        groups: Parameters, rate and weight decay of each.
        fuses: Whether SGD may be fused: torch 2.13 cannot on DTensors, and in a low format it would round otherwise than there.
    """
    match cfg.name:
        case "adamw":
            return torch.optim.AdamW(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, amsgrad=cfg.amsgrad, fused=True)
        case "adam":
            return torch.optim.Adam(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, amsgrad=cfg.amsgrad, fused=True)
        case "sgd":
            # With momentum the fused kernel fails on a parameter that first has a gradient after others (torch 2.13, _fused_sgd).
            fused = fuses and not cfg.momentum
            return torch.optim.SGD(groups, lr=cfg.lr, momentum=cfg.momentum, nesterov=cfg.nesterov, fused=fused)
        case "adagrad":
            return torch.optim.Adagrad(groups, lr=cfg.lr, eps=cfg.eps)
        case "lion":
            from lion_pytorch import Lion

            lion: torch.optim.Optimizer = Lion(groups, lr=cfg.lr, betas=cfg.betas)
            return lion


def checked(build: OptimizerFactory, *, sharded: bool) -> OptimizerBuilder:
    """A builder from a caller's factory, which refuses to return what would not train the model as asked.

    Args:
        build: Gets the trainable parameters, without their names.
        sharded: Whether the optimizer will see only parts of tensors.
    """
    if not callable(build):
        _refuse(
            f"is a {type(build).__name__}; pass a new torch.optim.Optimizer over model.parameters(), or a function that builds one, "
            "such as lambda params: torch.optim.Adam(params, lr=1e-3)"
        )

    def build_checked(named: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        params = [parameter for _, parameter in named]
        optimizer: object = build(params)
        if not isinstance(optimizer, torch.optim.Optimizer):
            _refuse(f"factory returned {type(optimizer).__name__}; it must return a torch.optim.Optimizer")
        if problem := next(_misfits(optimizer, sharded=sharded), None):
            _refuse(problem)
        given = {id(parameter) for parameter in params}
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if held - given:
            _refuse(f"factory took {len(held - given)} parameters that it was not given; build it from its argument alone")
        _require_steps(optimizer)
        if given - held:
            _refuse(f"factory left out {len(given - held)} of {len(given)} trainable parameters; freeze those with requires_grad_(False)")
        return optimizer

    return build_checked


def adopt(optimizer: torch.optim.Optimizer, model: nn.Module, *, sharded: bool) -> OptimizerBuilder:
    """A builder that moves a caller's own optimizer to the sharded parameters, its groups and options as they are.

    The object and the dicts of its groups stay the same, so that a scheduler made on it goes on writing the live learning rates.

    Args:
        optimizer: Made from the parameters of `model`, not stepped yet.
        model: Not sharded yet.
        sharded: Whether the optimizer will see only parts of tensors.

    Raises:
        ConfigError: It has state, holds other parameters than the model's trainable ones, or cannot work on parts.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if problem := next(_unfit(optimizer, model, names, sharded=sharded), None):
        _refuse(problem)
    kept = [[(at, names[id(p)]) for at, p in enumerate(group["params"]) if p.requires_grad] for group in optimizer.param_groups]

    def move(named: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        found = dict(named)
        # Adagrad alone has state before its first step, and makes it anew where there is none (torch 2.13, optim/adagrad.py).
        optimizer.state.clear()
        for group, places in zip(optimizer.param_groups, kept, strict=True):
            group["params"] = [found[name] for _, name in places]
            if "param_names" in group:
                group["param_names"] = [group["param_names"][at] for at, _ in places]
            if isinstance(group["lr"], Tensor):
                group["lr"] = group["lr"].item()  # a schedule writes numbers, and DTensor does not mix with tensors
            if group.get("fused") and isinstance(optimizer, _NOT_FUSED_ON_SHARDS) and isinstance(group["params"][0], DTensor):
                group["fused"] = False
        _require_steps(optimizer)
        return optimizer

    return move


def description_of(optimizer: object, model: object) -> dict[str, Any]:
    """What must be the same on every rank: the class, and the parameters and plain options of each group. Raises nothing."""
    described: dict[str, Any] = {"optimizer": "that of the config" if optimizer is None else type(optimizer).__name__}
    if isinstance(optimizer, torch.optim.Optimizer) and isinstance(model, nn.Module):
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for index, group in enumerate(optimizer.param_groups):
            described[f"parameters of group {index}"] = ", ".join(names.get(id(parameter), "another") for parameter in group["params"])
            for option, value in group.items():
                plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
                if isinstance(plain, int | float | str | tuple | None):
                    described[f"{option} of group {index}"] = plain
    return described


def _unfit(optimizer: torch.optim.Optimizer, model: nn.Module, names: dict[int, str], *, sharded: bool) -> Iterator[str]:
    """What is wrong with a caller's own optimizer."""
    kind = type(optimizer).__name__
    yield from _misfits(optimizer, sharded=sharded)
    if _has_state(optimizer):
        yield (
            f"{kind} has state of {len(optimizer.state)} parameters already, which sharding would lose; pass one that has not stepped and "
            "into which no state has been loaded"
        )
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if held - names.keys():
        yield (
            f"{kind} holds {len(held - names.keys())} parameters that are not among {type(model).__name__}'s; make it from "
            "model.parameters(), after the last change to the model and before prepare"
        )
    missing = [name for name, parameter in model.named_parameters() if parameter.requires_grad and id(parameter) not in held]
    if missing:
        yield (
            f"{kind} leaves out {len(missing)} trainable parameters ({', '.join(missing[:3])}); freeze those with requires_grad_(False) "
            "or add them to a group"
        )
    for index, group in enumerate(optimizer.param_groups):
        if not any(parameter.requires_grad for parameter in group["params"]):
            yield f"group {index} of {kind} holds only frozen parameters; leave it out"


def _misfits(optimizer: torch.optim.Optimizer, *, sharded: bool) -> Iterator[str]:
    """Why an optimizer would not train as in plain torch."""
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        yield "LBFGS computes the loss again within a step, which no engine can; choose another optimizer"
    if sharded and isinstance(optimizer, _WHOLE_TENSORS):
        yield f"{kind} works on whole tensors, and engines hand it parts; choose no_shard or another optimizer"
    for option, why in (
        ("differentiable", "nothing goes backward through an update here"),
        ("capturable", "the update is not captured in a CUDA graph"),
    ):
        if any(group.get(option) for group in optimizer.param_groups):
            yield f"{kind} has {option}=True, and {why}; leave it out"


def _require_steps(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, _NOT_ON_SHARDS) and any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"]):
        _refuse(f"torch cannot step {type(optimizer).__name__} on FSDP2's shards; choose no_shard, backend deepspeed, or another optimizer")


def _has_state(optimizer: torch.optim.Optimizer) -> bool:
    states = [state for state in optimizer.state.values() if any(value is not None for value in state.values())]
    if isinstance(optimizer, torch.optim.Adagrad):
        return any(float(state["step"]) for state in states)
    return bool(states)


def _refuse(what: str) -> NoReturn:
    raise ConfigError([Problem("optimizer", what)])
