"""Parameter groups of the config: match patterns with parameter names, before anything is sharded."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from unishard import config
from unishard.contract.model_shape import ParameterShape
from unishard.errors import ConfigError, Problem

_SHOWN = 12
_NO_MATRIX = (
    "auto finds no matrix: no trainable weight of two or three dimensions in a repeated block; name them by patterns, "
    "such as [proj], or choose optimizer.name: adamw"
)
_OTHER_SHAPE = "matches {name}, whose shape {shape} is no matrix; write patterns that match weights only"


class NamedGroup(NamedTuple):
    """Parameters that share a learning rate and a weight decay."""

    names: tuple[str, ...]
    """In model order."""
    lr: float
    weight_decay: float
    matrices: bool = False
    """Whether they are updated as matrices."""


def groups_of(
    cfg: config.Optimizer, trainable: Sequence[str], frozen: Iterable[str] = (), matrices: Collection[str] = ()
) -> list[NamedGroup]:
    """Group parameters: first those in no section, then the sections, each split by `no_decay`, and by whether they are
    matrices, which come first.

    Args:
        cfg: The section `optimizer`, with `no_decay` and `groups`.
        trainable: Names of the trainable parameters, in model order.
        frozen: Names of the frozen parameters, for messages.
        matrices: Those that are updated as matrices; see `matrices_of`.

    Raises:
        ConfigError: A pattern of a section matches no trainable parameter, all of `no_decay` match no parameter, or a
            section gets none; lists the candidates.
    """
    claims = {name: _claim(cfg, name) for name in trainable}
    if problems := _problems(cfg, claims, set(frozen)):
        raise ConfigError(problems)
    members: dict[tuple[int, bool, bool], list[str]] = {}
    for name in trainable:
        members.setdefault((claims[name], name not in matrices, _matches(cfg.no_decay, name)), []).append(name)
    groups = []
    for (claim, plain, exempt), names in sorted(members.items()):
        section = cfg.groups[claim] if claim >= 0 else config.ParameterGroup.model_construct()
        decay = section.weight_decay if section.weight_decay is not None else 0.0 if exempt else cfg.weight_decay
        rate = cfg.adamw_lr if plain and cfg.adamw_lr is not None else cfg.lr
        groups.append(NamedGroup(tuple(names), rate if section.lr is None else section.lr, decay, not plain))
    return groups


def matrices_of(cfg: config.Optimizer, trainable: Iterable[ParameterShape]) -> frozenset[str]:
    """The names of the trainable parameters that the config's optimizer updates as matrices.

    Raises:
        ConfigError: A pattern of `matrices` matches none, or one that is no matrix; or there is none.
    """
    if cfg.name != "muon":
        return frozenset()
    shapes = {each.name: each for each in trainable}
    if cfg.matrices == "auto":
        found = frozenset(name for name, each in shapes.items() if each.matrix)
        problems = [] if found else [Problem("optimizer.matrices", _NO_MATRIX)]
    else:
        found = frozenset(name for name in shapes if _matches(cfg.matrices, name))
        problems = [
            Problem("optimizer.matrices", _OTHER_SHAPE.format(name=name, shape=shapes[name].shape))
            for name in sorted(found)
            if len(shapes[name].shape) not in (2, 3)
        ]
        problems += _unmatched("optimizer.matrices", cfg.matrices, shapes, set())
    if problems:
        raise ConfigError(problems)
    return found


def _claim(cfg: config.Optimizer, name: str) -> int:
    """Index of the first section that matches a parameter; -1 for none."""
    return next((index for index, section in enumerate(cfg.groups) if _matches(section.params, name)), -1)


def _matches(patterns: Iterable[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def without_match(cfg: config.Optimizer, trainable: Iterable[str], frozen: Iterable[str] = ()) -> list[Problem]:
    """The patterns of `no_decay` that match no trainable parameter: a warning beside others that do, and where
    any matches a frozen one, as in a config for several models and their adapters.
    """
    return [*_unmatched("optimizer.no_decay", cfg.no_decay, list(trainable), set(frozen))]


def _unmatched(path: str, patterns: Iterable[str], trainable: Iterable[str], frozen: set[str]) -> Iterator[Problem]:
    for pattern in patterns:
        if not any(re.search(pattern, name) for name in trainable):
            yield Problem(path, _without_match(pattern, trainable, frozen))


def _problems(cfg: config.Optimizer, claims: Mapping[str, int], frozen: set[str]) -> list[Problem]:
    known = any(_matches(cfg.no_decay, name) for name in (*claims, *frozen))
    problems = [] if known else without_match(cfg, claims, frozen)
    for index, section in enumerate(cfg.groups):
        problems += _unmatched(f"optimizer.groups[{index}].params", section.params, claims, frozen)
    if not problems:
        problems = [
            Problem(
                f"optimizer.groups[{index}].params", "matches only parameters of earlier sections; move this section up"
            )
            for index in range(len(cfg.groups))
            if index not in claims.values()
        ]
    return problems


def _without_match(pattern: str, trainable: Iterable[str], frozen: set[str]) -> str:
    if any(re.search(pattern, name) for name in frozen):
        return (
            f"{pattern!r} matches only frozen parameters; remove it, or call requires_grad_(True) on them before "
            "prepare"
        )
    # List repeated blocks once.
    candidates = list(dict.fromkeys(re.sub(r"\.\d+\.", ".0.", name) for name in trainable))
    more = ", ..." if len(candidates) > _SHOWN else ""
    return f"{pattern!r} matches no parameter; write part of a name, such as {', '.join(candidates[:_SHOWN])}{more}"
