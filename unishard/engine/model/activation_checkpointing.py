"""Activation checkpointing: modules that keep only their inputs and run their forward again in backward.

It happens inside the module's `forward`, so that the engines' hooks (gather, release, cast) stay outside and run once, and no module
or parameter changes its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial, update_wrapper
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from unishard.config import Config
from unishard.engine.model.kv_cache import without_cache
from unishard.engine.model.units import Unit, find_blocks, find_classes
from unishard.errors import ModelError

__all__ = ["SAVED", "apply", "find"]

_FIELD = "activation_checkpointing"

SAVED = (
    # Products with weights. Not aten.bmm: the scores of an attention that is no fused operation grow with the square of the length.
    "mm",
    "addmm",
    "_scaled_mm",
    "_grouped_mm",
    "convolution",
    # Fused attention, whichever kernel torch chooses.
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
"""Operations of `torch.ops.aten` whose results `selective` keeps."""


def find(model: nn.Module, cfg: Config) -> list[Unit]:
    """The modules whose forward is to run again in backward.

    Args:
        model: Any module, not yet sharded.
        cfg: Its `activation_checkpointing`, and `sharding.units` for what a block is.

    Raises:
        ModelError: A named class matches no module, there are no blocks, or the model recomputes already.
    """
    asked = cfg.activation_checkpointing
    if asked == "none":
        return []
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            raise ModelError(
                f"{_FIELD}: {name or 'the model'} recomputes already (gradient_checkpointing_enable); call "
                f"model.gradient_checkpointing_disable(), or set {_FIELD} to none"
            )
    return find_classes(model, asked, _FIELD) if isinstance(asked, list) else find_blocks(model, cfg.sharding, _FIELD)


def apply(modules: Sequence[Unit], *, selective: bool) -> None:
    """Let modules run their forward again in backward, where gradients are wanted at all.

    Args:
        modules: None of them inside another.
        selective: Keep what `SAVED` names.
    """
    run = _in_part if selective else _whole
    for unit in modules:
        forward = unit.module.forward
        # A partial of a method, not a closure: a copy of the model then calls its own forward.
        unit.module.forward = update_wrapper(partial(run, forward), forward)


# A cache would be filled a second time in the second forward; transformers' own GradientCheckpointingLayer leaves it out too.
#
# Two functions, because torch.compile takes no `context_fn` that it cannot see in the source (torch 2.13). What else is written out
# are torch's defaults: random numbers are drawn again alike, and shapes and dtypes are compared.


def _whole(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    args, kwargs = without_cache(args, kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=True, determinism_check="default", **kwargs)


def _in_part(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    args, kwargs = without_cache(args, kwargs)
    return checkpoint(
        forward, *args, use_reentrant=False, context_fn=_contexts, preserve_rng_state=True, determinism_check="default", **kwargs
    )


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _saved() else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _saved() -> frozenset[Any]:
    """Those of them that this torch has."""
    return frozenset(getattr(torch.ops.aten, name).default for name in SAVED if hasattr(torch.ops.aten, name))
