"""How attention of a model sees whole sequences."""

from __future__ import annotations

from typing import Any

from torch import nn

from unishard.config import SequenceParallel


def sequence_of(model: nn.Module, section: SequenceParallel) -> SequenceParallel:
    """The section with `method` decided for a model: `ulysses` where the heads that its config names divide.

    For a model without such a config it stays `auto`: each call of `unishard.attention` decides by its own heads.
    """
    heads = _heads(model)
    if not section.on or section.method != "auto" or heads is None:
        return section
    return section.model_copy(update={"method": "allgather" if heads % section.size else "ulysses"})


def _heads(model: nn.Module) -> int | None:
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        heads = getattr(text, "num_attention_heads", None)
        if isinstance(heads, int):
            return heads
    return None
