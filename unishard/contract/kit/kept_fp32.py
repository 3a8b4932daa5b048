"""What stays in fp32 in a 16-bit run (`precision.keep_fp32`), the same for every engine.

The patterns in `keep_fp32`, or in transformers' lists, are matched with names of parameters and buffers, as
transformers does. What is kept is marked, so that whatever casts or shards it can ask; sharding keeps attributes of
parameters.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from torch import Tensor, nn

from unishard.config import Precision
from unishard.distributed.dtypes import declared_by, floating_tensors
from unishard.errors import ConfigError, Problem

_MARK = "_unishard_keeps_fp32"
_SHOWN = 8


class Kept(NamedTuple):
    """Tensors of a model that stay in fp32."""

    parameters: tuple[str, ...] = ()
    """Names of parameters; of a tied one, one name."""
    buffers: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Of both."""
        return (*self.parameters, *self.buffers)


def find_kept(model: nn.Module, cfg: Precision, *, train: bool = True) -> Kept:
    """Find what stays in fp32. Changes nothing.

    Args:
        model: Not sharded yet.
        cfg: The section `precision`, with `keep_fp32`.
        train: Whether there are master weights and gradients.

    Raises:
        ConfigError: A pattern matches nothing or everything, or the other dtypes would round what is kept.
    """
    if cfg.compute == "fp32":
        return Kept()
    names = dict(floating_tensors(model))
    matched = declared_by(model, cfg.compute) if cfg.keep_fp32 == "auto" else _asked(names, cfg.keep_fp32)
    kept_ids = {id(names[name]) for name in matched if name in names}
    inside = {id(each) for module in model.modules() if _whole(module, kept_ids) for each in module.buffers()}
    kept = Kept(
        tuple(name for name, each in model.named_parameters() if id(each) in kept_ids),
        tuple(
            name for name, each in model.named_buffers() if id(each) in kept_ids | inside and each.is_floating_point()
        ),
    )
    if problem := next(_problems(model, kept, cfg, train=train), None):
        raise ConfigError([Problem("precision.keep_fp32", problem)])
    return kept


def _asked(names: Iterable[str], patterns: Iterable[str]) -> set[str]:
    matched_names: set[str] = set()
    for pattern in patterns:
        matched = {name for name in names if re.search(pattern, name)}
        if not matched:
            candidates = list(dict.fromkeys(re.sub(r"\.\d+\.", ".0.", name) for name in names))
            more = ", ..." if len(candidates) > _SHOWN else ""
            message = f"{pattern!r} matches no floating-point parameter or buffer; write part of a name, such as "
            raise ConfigError([Problem("precision.keep_fp32", f"{message}{', '.join(candidates[:_SHOWN])}{more}")])
        matched_names |= matched
    return matched_names


def _problems(model: nn.Module, kept: Kept, cfg: Precision, *, train: bool) -> Iterator[str]:
    named = dict(model.named_parameters())
    if kept.parameters and len(kept.parameters) == sum(each.is_floating_point() for each in named.values()):
        yield "keeps every parameter; set precision.compute to fp32 instead"
    trained = [name for name in kept.parameters if named[name].requires_grad]
    rounding = [name for name in ("master", "reduce", "accumulate") if getattr(cfg, name) != "fp32"]
    if train and trained and rounding:
        whose = f"{type(model).__name__} asks for it, and " if cfg.keep_fp32 == "auto" else ""
        yield (
            f"keeps {trained[0]} in fp32 ({whose}precision.{rounding[0]} {getattr(cfg, rounding[0])} would round it); "
            f"set precision.{rounding[0]} to fp32, or keep_fp32 to [] to keep nothing"
        )


def mark_kept(model: nn.Module, names: Collection[str]) -> None:
    """Mark the parameters and buffers that are kept."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in names:
            setattr(tensor, _MARK, True)


def is_kept(tensor: Tensor) -> bool:
    """Whether a parameter or buffer stays in fp32."""
    return getattr(tensor, _MARK, False)


def all_kept(module: nn.Module) -> bool:
    """Whether a module has parameters and all of them stay in fp32, so that it also computes in fp32."""
    return _whole(module, {id(each) for each in module.parameters() if is_kept(each)})


def _whole(module: nn.Module, kept: set[int]) -> bool:
    parameters = [id(each) for each in module.parameters()]
    return bool(parameters) and kept.issuperset(parameters)


def modules_kept(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules that compute in fp32 and have a forward."""
    for child in module.children():
        if all_kept(child) and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield child
        else:
            yield from modules_kept(child)
