"""A model that transformers does not have, registered with it: the code travels with its files."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

__all__ = ["OwnConfig", "OwnForCausalLM"]


class OwnConfig(PretrainedConfig):
    model_type = "own_code"

    def __init__(self, vocab_size: int = 40, hidden_size: int = 16, **more: Any) -> None:
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        super().__init__(**more)


class OwnBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.inner(hidden))


class OwnForCausalLM(PreTrainedModel):
    config_class = OwnConfig
    _no_split_modules = ["OwnBlock"]  # noqa: RUF012 - as classes of transformers declare it

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(OwnBlock(config.hidden_size) for _ in range(2))
        self.head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> CausalLMOutput:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        if labels is None:
            return CausalLMOutput(logits=logits)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)


OwnConfig.register_for_auto_class()
OwnForCausalLM.register_for_auto_class("AutoModelForCausalLM")
