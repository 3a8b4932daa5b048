"""Parameters that every rank holds whole (`sharding.replicate`), the same for every engine.

They are marked, so that whatever shards can ask; sharding keeps attributes of parameters.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches

from torch import Tensor, nn

from unishard.config import Sharding
from unishard.distributed.slices import slice_of
from unishard.errors import ConfigError, Problem

_MARK = "_unishard_replicates"
_FIELD = "sharding.replicate"
_SHOWN = 8


def find_replicated(model: nn.Module, cfg: Sharding) -> tuple[str, ...]:
    """The first names of the parameters that are replicated, in model order. Changes nothing.

    A tied parameter is replicated under all its names if one of them matches.

    Args:
        model: Not sharded yet.
        cfg: The section `sharding`, with `replicate`.

    Raises:
        ConfigError: A pattern matches no parameter, or a strategy that shards has nothing left to shard.
    """
    if not cfg.replicate:
        return ()
    every = dict(model.named_parameters(remove_duplicate=False))
    for pattern in cfg.replicate:
        if not any(re.search(pattern, name) for name in every):
            raise ConfigError([Problem(_FIELD, _without_match(pattern, every))])
    matched = matching(model, cfg.replicate)
    names = tuple(name for name, each in model.named_parameters() if id(each) in matched)
    for name, each in model.named_parameters():
        if id(each) in matched and slice_of(each) is not None:
            message = f"matches {name}, of which `parallel` gives each rank a part; leave it out"
            raise ConfigError([Problem(_FIELD, message)])
    sharded = [each for each in every.values() if each.numel() and id(each) not in matched]
    if not sharded and cfg.strategy != "no_shard":
        message = f"matches every parameter of {type(model).__name__}; set sharding.strategy to no_shard instead"
        raise ConfigError([Problem(_FIELD, message)])
    return names


def matching(model: nn.Module, patterns: Collection[str]) -> set[int]:
    """The ids of the parameters of which a name matches a pattern."""
    named = model.named_parameters(remove_duplicate=False) if patterns else ()
    return {id(each) for name, each in named if any(re.search(pattern, name) for pattern in patterns)}


def _without_match(pattern: str, names: Iterable[str]) -> str:
    candidates = list(dict.fromkeys(re.sub(r"\.\d+\.", ".0.", name) for name in names))
    parts = [part for name in candidates for part in (name, name.rpartition(".")[0], *name.split("."))]
    near = get_close_matches(pattern, dict.fromkeys(parts), 1)
    shown = ", ".join(candidates[:_SHOWN]) + (", ..." if len(candidates) > _SHOWN else "")
    hint = f"did you mean {near[0]!r}? Its names are" if near else "write part of a name, such as"
    return f"{pattern!r} matches no parameter; {hint} {shown}"


def mark_replicated(model: nn.Module, names: Collection[str]) -> None:
    """Mark the parameters that are replicated, and no others: a model may be prepared again."""
    for name, parameter in model.named_parameters():
        if name in names:
            setattr(parameter, _MARK, True)
        else:
            vars(parameter).pop(_MARK, None)


def is_replicated(parameter: Tensor) -> bool:
    """Whether every rank holds a parameter whole."""
    return getattr(parameter, _MARK, False)
