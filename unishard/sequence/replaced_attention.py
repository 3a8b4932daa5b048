"""Which attention of transformers' models ours stands in for, and which it cannot."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from unishard.errors import ModelError

_DEFAULT = "sdpa"
_BUILT_IN = ("transformers", "unishard")
"""Packages whose functions compute what their names say."""
_CHANGES_SCORES = ("indices", "block_indices", "sinks", "position_bias", "attention_bias", "alibi")
"""Arguments of attention functions by which models of transformers (5.23) choose or change scores."""


def replaced_attention(model: nn.Module) -> list[str]:
    """The names of the attention, other than the default one, that ours replaces in the models of transformers.

    All of them compute the softmax of scaled scores under the model's mask, windows, caps and sinks, as ours.

    Raises:
        ModelError: One is a function that transformers does not have, which may compute something else.
    """
    from transformers import AttentionInterface, PreTrainedModel

    functions, names = AttentionInterface(), set()
    for module in model.modules():
        name = module.config._attn_implementation if isinstance(module, PreTrainedModel) else None
        if name is None:
            continue
        names.add(name)
        function = functions.get(name)
        if function is not None and _package(function) not in _BUILT_IN:
            raise ModelError(
                f"attn_implementation of {type(module).__name__} is {name}, a function of {_package(function)}, in "
                "place of which parallel.sequence would compute plain attention; call "
                "model.set_attn_implementation('sdpa') before prepare if that is the same, else remove "
                "parallel.sequence"
            )
    return sorted(names - {_DEFAULT})


def _package(function: Callable[..., Any]) -> str:
    plain = inspect.unwrap(getattr(function, "func", function))
    return str(getattr(plain, "__module__", "")).partition(".")[0]


def require_plain_scores(module: nn.Module, options: Mapping[str, Any]) -> None:
    """Refuse a call of attention with arguments that ours would leave out.

    Args:
        module: That attends.
        options: What it passes beside queries, keys, values, mask, scale and dropout.

    Raises:
        ModelError: Some change the scores, or it is to return them.
    """
    for name in _CHANGES_SCORES:
        if options.get(name) is not None:
            raise ModelError(
                f"{type(module).__name__} chooses or changes scores of attention by {name}, which parallel.sequence "
                "does not support; remove parallel.sequence"
            )
    if options.get("output_attentions") or getattr(getattr(module, "config", None), "output_attentions", False):
        raise ModelError(
            f"{type(module).__name__} is asked for attention weights (output_attentions), which no rank has under "
            "parallel.sequence; leave output_attentions out, or remove parallel.sequence"
        )
