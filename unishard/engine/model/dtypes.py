"""Cast a model to the config's dtypes before it is sharded, the same for every engine."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from unishard.config import Precision
from unishard.distributed.dtypes import DTYPES, declared_by, floating_tensors
from unishard.errors import ConfigError, Problem

# -- What stays in fp32 in a 16-bit run (`precision.keep_fp32`), the same for every engine ---------
# The patterns in `keep_fp32`, or in transformers' lists, are matched with names of parameters and buffers, as
# transformers does. What is kept is marked, so that whatever casts or shards it can ask; sharding keeps attributes of
# parameters.

_MARK = "_unishard_keeps_fp32"
_SHOWN = 8


class Kept(NamedTuple):
    """Tensors of a model that stay in fp32."""

    parameters: tuple[str, ...] = ()
    """Names of parameters; of a tied one, one name."""
    buffers: tuple[str, ...] = ()
    elements: int = 0
    """Elements of the parameters."""

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
    kept = {id(names[name]) for name in matched if name in names}
    inside = {id(each) for module in model.modules() if _whole(module, kept) for each in module.buffers()}
    found = Kept(
        tuple(name for name, each in model.named_parameters() if id(each) in kept),
        tuple(name for name, each in model.named_buffers() if id(each) in kept | inside and each.is_floating_point()),
        sum(each.numel() for each in model.parameters() if id(each) in kept),
    )
    if problem := next(_problems(model, found, cfg, train=train), None):
        raise ConfigError([Problem("precision.keep_fp32", problem)])
    return found


def _asked(names: Iterable[str], patterns: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for pattern in patterns:
        matched = {name for name in names if re.search(pattern, name)}
        if not matched:
            candidates = list(dict.fromkeys(re.sub(r"\.\d+\.", ".0.", name) for name in names))
            more = ", ..." if len(candidates) > _SHOWN else ""
            what = f"{pattern!r} matches no floating-point parameter or buffer; write part of a name, such as "
            raise ConfigError([Problem("precision.keep_fp32", f"{what}{', '.join(candidates[:_SHOWN])}{more}")])
        found |= matched
    return found


def _problems(model: nn.Module, found: Kept, cfg: Precision, *, train: bool) -> Iterator[str]:
    named = dict(model.named_parameters())
    if found.parameters and len(found.parameters) == sum(each.is_floating_point() for each in named.values()):
        yield "keeps every parameter; set precision.compute to fp32 instead"
    trained = [name for name in found.parameters if named[name].requires_grad]
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


@torch.no_grad()
def cast_model(model: nn.Module, cfg: Precision, *, train: bool = True) -> None:
    """Cast the trainable parameters to `precision.master`, and the buffers to `precision.buffers`, in place.

    So a model loaded in bf16 has fp32 master weights on every engine: DeepSpeed creates them itself, but FSDP2 would
    update bf16 weights. Frozen parameters keep their dtype, because nothing updates them. What `precision.keep_fp32`
    keeps becomes fp32. Parameters stay the same objects and stay tied.

    Args:
        model: The full model, not sharded.
        cfg: The section `precision`, with `master` and `buffers`.
        train: Whether there are master weights.
    """
    master = DTYPES[cfg.master]
    for parameter in model.parameters():
        trained = train and parameter.requires_grad
        if trained and parameter.dtype != master:
            parameter.data = parameter.data.to(master)
            parameter.grad = None
        elif not trained and is_kept(parameter):
            parameter.data = _at_least_fp32(parameter.data)
    for buffer in model.buffers():
        if is_kept(buffer):
            buffer.data = _at_least_fp32(buffer.data)
        elif cfg.buffers != "keep" and buffer.is_floating_point():
            buffer.data = buffer.data.to(DTYPES[cfg.buffers])


def _at_least_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.itemsize < torch.float32.itemsize else tensor


def cast_to_compute(tensors: Iterable[Tensor], cfg: Precision) -> None:
    """Cast floating-point parameters to `precision.compute`, but for those kept in fp32, and freeze all; buffers keep
    their dtype.
    """
    dtype = DTYPES[cfg.compute]
    for tensor in tensors:
        if isinstance(tensor, nn.Parameter):
            tensor.requires_grad_(False)
            if tensor.is_floating_point() and not is_kept(tensor):
                tensor.data = tensor.data.to(dtype)


# -- How matrix products of fp32 tensors are computed: one setting of torch for the whole process --

_WORDS = {"fp32": "highest", "tf32": "high"}
_matmul_asked: set[str] = set()
"""What an earlier `prepare` of this process has set; one value at most."""


def check_matmul(precision: Precision) -> None:
    """Check that no earlier `prepare` has set another value: it would change for that model, too. Not collective.

    Raises:
        ConfigError: One has.
    """
    for earlier in _matmul_asked - {precision.matmul, "keep"} if precision.matmul != "keep" else ():
        what = (
            f"is {precision.matmul}, but an earlier prepare of this process has set {earlier}, and torch has one "
            f"setting for all models; write {earlier} or keep, or use another process"
        )
        raise ConfigError([Problem("precision.matmul", what)])


def set_matmul(precision: Precision) -> None:
    """Set it, unless it is `keep`. Not collective."""
    if precision.matmul != "keep":
        torch.set_float32_matmul_precision(_WORDS[precision.matmul])
        _matmul_asked.add(precision.matmul)
