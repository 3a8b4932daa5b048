"""Models with experts, whose layers other tests divide over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 4,
}

IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
"""Of transformers, by which a name here has its experts computed; by default the last."""


class Experts(nn.Module):
    """Of a model that transformers does not know."""

    def __init__(self, width: int, weighs_inputs: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.num_experts, self._weighs_inputs = 4, weighs_inputs
        self.weights = nn.Parameter(torch.randn(4, width, width) / 4)
        self.biases = nn.Parameter(torch.randn(4, width) / 4)

    def forward(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        results = torch.zeros_like(tokens)
        for number in range(self.num_experts):
            row, place = torch.where(chosen == number)
            weight, inputs = weights[row, place, None].to(tokens.dtype), tokens[row]
            if self._weighs_inputs:
                inputs, weight = inputs * weight, 1
            made = functional.silu(inputs @ self.weights[number] + self.biases[number])
            if self.training and self.dropout:  # another mask where there are fewer tokens, as on other devices
                made = made * torch.rand(made.shape[::-1]).T.gt(self.dropout)
            results = results.index_add(0, row, made * weight)
        return results


class Own(nn.Module):
    """Every token goes to one expert, and all tokens of both ranks to the first two of four."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.embed, self.experts, self.head = nn.Embedding(32, 16), Experts(16, **given), nn.Linear(16, 32)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = self.embed(input_ids)
        chosen = (input_ids % 2).unsqueeze(-1)
        weights = torch.sigmoid(hidden.mean(-1, keepdim=True))
        made = self.experts(hidden.flatten(0, 1), chosen.flatten(0, 1), weights.flatten(0, 1)).view_as(hidden)
        return functional.cross_entropy(self.head(hidden + made).flatten(0, 1), labels.flatten())


def build(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        if name == "own":
            return Own()
        if name == "dense":
            sizes = {key: value for key, value in SIZES.items() if key != "num_local_experts"}
            return LlamaForCausalLM(LlamaConfig(**sizes))
        model = MixtralForCausalLM(MixtralConfig(**SIZES, output_router_logits=name == "balanced"))
        if name in IMPLEMENTATIONS:
            model.set_experts_implementation(name)
        return model
