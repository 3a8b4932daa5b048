"""What plain torch makes of a case: a model for each rank, all in one process, whose gradients are averaged."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dev.models.case import Case, micro_batch
from dev.models.runs import MORE, UPDATES, WORLD, Run, config_of
from unishard.config import Optimizer

__all__ = ["Reference", "reference"]

_LOW = {"bf16": torch.bfloat16}


class Reference(NamedTuple):
    """The figures of plain torch."""

    losses: list[float]
    norms: list[float]
    parameters: dict[int, dict[str, Tensor]]
    """By the number of updates, the master weights."""


def reference(case: Case, precision: str, *, world: int = WORLD, device: str = "cpu", seed: int = 0) -> Reference:
    """Train a case in plain torch: in fp32, or with a copy in 16 bits of fp32 master weights."""
    master = case.build().to(device).train()
    ranks = [master] if precision == "fp32" else []  # what a forward of rank 0 writes into the master weights stays
    ranks += [case.build().to(device).train() for _ in range(world - len(ranks))]
    if precision != "fp32":
        _lower(case, ranks, _LOW[precision])
    trained = [parameter for parameter in master.parameters() if parameter.requires_grad]
    optimizer = _optimizer(config_of(case, Run("fsdp", "full_shard", precision)).optimizer, trained)
    states = [torch.Generator().manual_seed(seed + rank).get_state() for rank in range(world)]
    losses, norms, parameters = [], [], {}
    for update in range(UPDATES + MORE):
        for model in ranks:
            _copy(master, model)
        total = 0.0
        for rank, model in enumerate(ranks):
            with _drawing(states, rank):
                if case.before is not None:
                    case.before(model, update)
                loss = case.loss(model, micro_batch(case, update, rank, world, device))
                loss.backward()
            total += loss.item()
        _average(master, ranks)
        losses.append(total / world)
        norms.append(_norm(trained))
        optimizer.step()
        optimizer.zero_grad()
        if update + 1 in (UPDATES, UPDATES + MORE):
            parameters[update + 1] = {name: parameter.detach().clone() for name, parameter in master.named_parameters()}
    return Reference(losses, norms, parameters)


def _lower(case: Case, ranks: list[nn.Module], dtype: torch.dtype) -> None:
    """Let them compute in 16 bits."""
    for model in ranks:
        for name, tensor in (*model.named_parameters(), *(model.named_buffers() if case.low_buffers else ())):
            if not any(re.search(pattern, name) for pattern in _patterns_of_fp32(model, dtype)):
                tensor.data = _cast(tensor.data, dtype)
        model.register_forward_pre_hook(
            lambda _, args, kwargs: tree_map(lambda each: _cast(each, dtype), (args, kwargs)), with_kwargs=True
        )


def _patterns_of_fp32(model: Any, dtype: torch.dtype) -> Iterable[str]:
    """What a model of transformers loads in fp32 although the dtype is asked for."""
    return model._get_dtype_plan(dtype) if hasattr(model, "_get_dtype_plan") else ()


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _copy(master: nn.Module, model: nn.Module) -> None:
    if model is not master:
        for copy, original in zip(model.parameters(), master.parameters(), strict=True):
            copy.data.copy_(original.data)


@contextmanager
def _drawing(states: list[Tensor], rank: int) -> Iterator[None]:
    """Let a rank draw its own random numbers, as processes do."""
    torch.set_rng_state(states[rank])
    yield
    states[rank] = torch.get_rng_state()


def _average(master: nn.Module, ranks: list[nn.Module]) -> None:
    """Set the gradients of the master weights to the mean over the ranks, in fp32."""
    found = [[_taken(parameter) for parameter in model.parameters()] for model in ranks]
    for parameter, *gradients in zip(master.parameters(), *found, strict=True):
        given = [gradient.to(parameter.dtype) for gradient in gradients if gradient is not None]
        parameter.grad = sum(given[1:], given[0]) / len(ranks) if given else None


def _taken(parameter: nn.Parameter) -> Tensor | None:
    gradient, parameter.grad = parameter.grad, None
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def _norm(parameters: list[nn.Parameter]) -> float:
    squares = [parameter.grad.abs().double().square().sum() for parameter in parameters if parameter.grad is not None]
    return torch.stack(squares).sum().sqrt().item()


def _optimizer(cfg: Optimizer, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if cfg.name == "sgd":
        return torch.optim.SGD(parameters, cfg.lr, momentum=cfg.momentum, weight_decay=cfg.weight_decay)
    return torch.optim.AdamW(parameters, cfg.lr, betas=cfg.betas, eps=cfg.eps, weight_decay=cfg.weight_decay)
