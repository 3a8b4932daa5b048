"""A plan counts a causal mask where a run makes one: not for whole documents, but for a window over them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from transformers import AttentionMaskInterface, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from unishard.config import Config
from unishard.tools.plan.tracing import trace

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "attn_implementation": "sdpa",
    "use_cache": False,
}


def tokens(samples: int, length: int) -> dict[str, Tensor]:
    return {name: torch.zeros(samples, length, dtype=torch.long) for name in ("input_ids", "labels")}


@pytest.mark.parametrize(
    ("kind", "config", "makes_one"),
    [
        (LlamaForCausalLM, LlamaConfig(**SIZES), False),
        (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=64), True),
    ],
    ids=["llama", "window"],
)
def test_activations_grow_with_the_square_of_the_tokens_where_a_run_makes_a_mask(kind, config, makes_one):
    before, peaks = AttentionMaskInterface()["sdpa"], []
    for length in (2048, 4096):
        fake = FakeTensorMode()
        with fake:
            model = kind(config)
        traced = trace(
            model, Config(), tokens, lambda output: output.loss, micro_batch_size=1, seq_len=length, fake=fake, noted=[]
        )
        peaks.append(traced.peak)
    assert (peaks[1] > 2.5 * peaks[0]) is makes_one
    assert AttentionMaskInterface()["sdpa"] is before
