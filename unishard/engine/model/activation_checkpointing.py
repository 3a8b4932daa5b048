"""Activation checkpointing: modules that keep only their inputs and recompute their forward in backward.

It wraps the module's `forward`, so the engines' hooks (gather, release, cast) stay outside and run once, and module and
parameter names do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from unishard.config import Sharding
from unishard.contract.units import Unit
from unishard.engine.model.kv_cache import without_cache
from unishard.engine.model.restored_buffers import RestoredBuffers, Start
from unishard.engine.model.selective_recomputation import contexts
from unishard.engine.model.units import find_blocks, find_classes
from unishard.errors import ModelError

_FIELD = "activation_checkpointing"


def find(model: nn.Module, asked: str | list[str], sharding: Sharding) -> list[Unit]:
    """Find the modules to recompute in backward.

    Args:
        model: Any module, not yet sharded.
        asked: `activation_checkpointing`.
        sharding: The section; `units` defines the blocks.

    Raises:
        ModelError: A named class matches no module, there are no blocks, or the model already recomputes.
    """
    if asked == "none":
        return []
    refuse_own_recomputation(model, _FIELD)
    return find_classes(model, asked, _FIELD) if isinstance(asked, list) else find_blocks(model, sharding, _FIELD)


def refuse_own_recomputation(model: nn.Module, field: str) -> None:
    """Check that a model does not recompute by itself.

    Args:
        model: Not sharded yet.
        field: The config field that needs it, for messages.

    Raises:
        ModelError: It does.
    """
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            raise ModelError(
                f"{field}: {name or 'the model'} already recomputes (gradient_checkpointing_enable); call "
                f"model.gradient_checkpointing_disable(), or set {field} to none"
            )


def apply(modules: Sequence[Unit], *, selective: bool) -> None:
    """Make modules recompute their forward in backward, when gradients are enabled.

    Args:
        modules: None of them inside another.
        selective: Keep some results, see `selective_recomputation`.
    """
    run = _recompute_selectively if selective else _recompute_all
    for unit in modules:
        forward = unit.module.forward
        # A partial of a method, not a closure, so that a copy of the model calls its own forward.
        wrapped = update_wrapper(partial(run, forward, RestoredBuffers(unit)), forward)
        wrapped.recomputes = True  # type: ignore[attr-defined]  # for `contract.kit.forwards`
        unit.module.forward = wrapped


# Without the cache, which the second run would fill again; transformers' GradientCheckpointingLayer removes it too.
#
# Two functions, because torch.compile accepts `context_fn` only as a literal in the source (torch 2.13). The other
# arguments are torch's defaults: the random state is restored, and shapes and dtypes are compared.


def _recompute_all(forward: Callable[..., Any], buffers: RestoredBuffers, /, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    args, kwargs = without_cache(args, kwargs)
    run = checkpoint if buffers.steady else _eager_checkpoint
    return run(
        partial(_run, forward, buffers, []),
        *args,
        use_reentrant=False,
        preserve_rng_state=True,
        determinism_check="default",
        **kwargs,
    )


def _recompute_selectively(forward: Callable[..., Any], buffers: RestoredBuffers, /, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    args, kwargs = without_cache(args, kwargs)
    run = checkpoint if buffers.steady else _eager_checkpoint
    return run(
        partial(_run, forward, buffers, []),
        *args,
        use_reentrant=False,
        context_fn=contexts,
        preserve_rng_state=True,
        determinism_check="default",
        **kwargs,
    )


# torch.compile recomputes from what the forward has written into a buffer (torch 2.13), so a unit that writes one is
# not compiled.
_eager_checkpoint = torch.compiler.disable(checkpoint)  # type: ignore[no-untyped-call]


def _run(
    forward: Callable[..., Any], buffers: RestoredBuffers, starts: list[Start], /, *args: Any, **kwargs: Any
) -> Any:
    """Run a forward; the second time from the values that buffers had before the first."""
    if torch.compiler.is_compiling():
        return forward(*args, **kwargs)
    if starts:
        with buffers.as_before(starts):
            return forward(*args, **kwargs)
    starts += buffers.read()
    output = forward(*args, **kwargs)
    buffers.compare(starts)
    return output
