"""Parameter groups of one compute dtype and one group of ranks each: DeepSpeed's optimizers flatten a group into one
tensor.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.lr_scheduler import LRScheduler

from unishard.contract.kit.kept_fp32 import is_kept
from unishard.distributed.nested_optimizers import holds_copies, optimizers_in
from unishard.distributed.slices import slice_of
from unishard.errors import ConfigError, Problem

BY_GROUP = frozenset({"base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums"})
"""What schedulers of torch have a list of, by groups (torch 2.13, optim/lr_scheduler.py)."""
_ORIGINS: WeakKeyDictionary[torch.optim.Optimizer, list[int]] = WeakKeyDictionary()
"""Which group each one was a part of, by the optimizer."""
_MAKERS = "precision.keep_fp32, parallel.expert or parallel.tensor"


def separate(optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None) -> None:
    """Move slices (`parallel.expert`, `parallel.tensor`) and parameters that stay in fp32 (`precision.keep_fp32`) into
    groups of their own, with the same options, behind the others.

    The same for every engine, so that optimizers and checkpoints have the same groups. Changes nothing if there are
    none.

    Args:
        optimizer: Has not stepped yet.
        scheduler: One that the caller has built on the optimizer, with a rate for each of its groups.

    Raises:
        ConfigError: Groups would be moved, and there is such a scheduler, or one of the caller's own class, or the
            optimizer holds others or copies.
    """
    before = [*optimizer.param_groups]
    groups = [(*part, at) for at, group in enumerate(before) for part in _parts(group)]
    groups.sort(key=lambda part: part[0])  # stable
    if [*map(id, before)] == [id(group) for _, group, _, _ in groups]:
        return
    _require_free_order(optimizer, scheduler)
    for _, group, own, _ in groups:
        group.update(own)
    optimizer.param_groups[:] = [group for _, group, _, _ in groups]
    _ORIGINS[optimizer] = [at for *_, at in groups]
    for each in gc.get_objects():  # those that a loop steps itself, and that nobody has passed
        if issubclass(type(each), LRScheduler) and getattr(each, "optimizer", None) is optimizer:
            follow(each)


def follow(scheduler: Any) -> None:
    """Give a scheduler of torch that was built before `separate` a rate for each of the groups that there are now.

    For loops and frameworks that step schedulers themselves; does nothing to one that was built later.

    Raises:
        ConfigError: It is of another class, which may keep more by groups.
    """
    optimizer = getattr(scheduler, "optimizer", None)
    origins = _ORIGINS.get(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else None
    inside = [scheduler, *getattr(scheduler, "_schedulers", [])]
    if origins is None or all(len(getattr(each, "base_lrs", origins)) == len(origins) for each in inside):
        return
    if any(not type(each).__module__.startswith("torch.") for each in inside):
        raise ConfigError([_other_groups(scheduler)])
    for each in inside:
        for name in BY_GROUP:
            if isinstance(values := vars(each).get(name), list):
                vars(each)[name] = [values[at] for at in origins]


def _parts(group: dict[str, Any]) -> Iterator[tuple[tuple[bool, int], dict[str, Any], dict[str, Any]]]:
    """What a group is divided into: the kind of its parameters, the group, which is the old one once, and what it
    gets.
    """
    places: dict[tuple[bool, int], list[int]] = {}
    for at, parameter in enumerate(group["params"]):
        places.setdefault((is_kept(parameter), _slices(parameter)), []).append(at)
    for number, kind in enumerate(sorted(places) or [(False, 1)]):
        yield kind, dict(group) if number else group, _only(group, places.get(kind, []))


def _slices(parameter: Any) -> int:
    """Of how many slices it is one: those of as many have the same holders."""
    part = slice_of(parameter)
    return 1 if part is None else part.of


def _only(group: dict[str, Any], places: list[int]) -> dict[str, Any]:
    lists = [key for key in ("params", "param_names") if key in group]
    return {key: [group[key][at] for at in places] for key in lists}


def _require_free_order(optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None) -> None:
    """Check that nothing else goes by the groups of an optimizer."""
    if scheduler is not None:
        raise ConfigError([_other_groups(scheduler)])
    shapes = {parameter.shape for group in optimizer.param_groups for parameter in group["params"]}
    if len(optimizers_in(optimizer)) > 1 or holds_copies(optimizer, shapes):
        what = (
            f"{type(optimizer).__name__} holds other optimizers or copies of weights by its groups, which {_MAKERS} "
            "would change; give the parameters that it keeps groups of their own, behind the others"
        )
        raise ConfigError([Problem("optimizer", what)])


def _other_groups(scheduler: Any) -> Problem:
    what = (
        f"{type(scheduler).__name__} has a rate for each group of the optimizer, and {_MAKERS} makes other groups; "
        "pass a function that builds it, such as lambda optimizer: StepLR(optimizer, 30)"
    )
    return Problem("scheduler", what)
