"""Tiny models of which other tests cut the weights over ranks."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "pad_token_id": 0,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "one key head": ("Llama", {"num_key_value_heads": 1, "attention_bias": True}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "vocabulary that does not divide": ("Llama", {"vocab_size": 31, "tie_word_embeddings": True}),
    "padded": ("Llama", {"pad_token_id": 20}),
    "three heads": ("Llama", {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3}),
    "biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3, one key head": ("Qwen3", {"num_key_value_heads": 1}),
    "phi3": ("Phi3", {}),
    "olmo2": ("Olmo2", {}),
    "gemma3": ("Gemma3", {"sliding_window": 4}),
    "apertus": ("Apertus", {}),
    "mixtral": ("Mixtral", EXPERTS | {"output_router_logits": True}),
    "qwen3moe": ("Qwen3Moe", EXPERTS),
    "gpt-oss": ("GptOss", EXPERTS | {"sliding_window": 4}),
    "deepseek_v3": ("DeepseekV3", LATENT),
    "llama4": ("Llama4", EXPERTS | {"intermediate_size_mlp": 24}),
}


class Own(nn.Module):
    """Attention that counts its heads, a fused gate, and a head that shares the embedding's weight."""

    def __init__(self, **wrong: bool) -> None:
        super().__init__()
        self.wrong = wrong
        self.embed, self.norm = nn.Embedding(32, 16), nn.LayerNorm(16)
        self.num_heads = 4
        self.qkv = nn.ModuleDict({each: nn.Linear(16, 16) for each in "qkv"})
        self.scale = nn.LayerNorm(4)
        self.out = nn.Linear(16, 16)
        self.gate_up, self.down = nn.Linear(16, 48), nn.Linear(24, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        normed = self.norm(hidden)
        q, k, v = (self.qkv[each](normed).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in "qkv")
        mixed = functional.scaled_dot_product_attention(self.scale(q), k, v, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(-2))
        gate, up = self.gate_up(hidden).chunk(2, -1)
        hidden = hidden + self.down(functional.silu(gate) * up)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


PLAN = {
    "embed": "embedding_rowwise",
    "qkv.q": "colwise",
    "qkv.k": "colwise",
    "qkv.v": "colwise",
    "scale": "replicated_with_grad_allreduce",
    "out": "rowwise",
    "gate_up": "packed_colwise",
    "down": "rowwise",
}
"""Of the own model."""


def build(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        if name == "own":
            return Own()
        if name.startswith("lora"):
            return adapted(build("qwen3moe" if "experts" in name else "tied" if "words" in name else "biased"), name)
        stem, fields = FAMILIES[name.removesuffix(", quantized")]
        kind = "Llama4TextConfig" if stem == "Llama4" else "Gemma3TextConfig" if stem == "Gemma3" else f"{stem}Config"
        model: nn.Module = getattr(transformers, f"{stem}ForCausalLM")(getattr(transformers, kind)(**SIZES | fields))
        for parameter in model.parameters():  # none is zero or one, as norms and biases begin
            if parameter.dim() < 2:
                nn.init.uniform_(parameter, 0.5, 1)
        if "quantized" in name:
            model.model.layers[0].mlp.up_proj.weight = nn.Parameter(torch.zeros(9, 1).byte(), requires_grad=False)
        return model


_ADAPTED: dict[str, dict[str, Any]] = {
    "saved": {"modules_to_save": ["lm_head"]},
    "all words": {"target_modules": ["embed_tokens"]},
    "some words": {"trainable_token_indices": [3]},
    "experts": {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]},
    "parameter": {"target_modules": [], "target_parameters": ["o_proj.weight"]},
}
"""What adapters have beside linear modules, or in their place."""


def adapted(model: nn.Module, name: str) -> nn.Module:
    """With adapters of every linear module."""
    import peft

    more: dict[str, Any] = next((given for part, given in _ADAPTED.items() if part in name), {})
    config = peft.LoraConfig(
        r=2,
        init_lora_weights=False,
        use_dora="dora" in name,
        lora_bias="biased" in name,
        **{"target_modules": r".*(_proj)"} | more,
    )
    return peft.get_peft_model(model, config)
