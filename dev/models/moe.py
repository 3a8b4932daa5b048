"""Mixtures of experts."""

from __future__ import annotations

from typing import Any

from dev.models.case import Kind, hugging_face
from dev.models.data import SIZES, tokens
from dev.models.text import DECODER

__all__ = ["KIND"]

KIND = Kind("Mixtures of experts")
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 2,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "pad_token_id": 0,
}
"""DeepSeek's attention, with one layer that has no experts."""


def _add(
    name: str,
    stem: str,
    config: str = "{}Config",
    sizes: dict[str, Any] = DECODER,
    low_buffers: bool = False,
    **fields: Any,
) -> None:
    KIND.add(
        name,
        hugging_face(f"{stem}ForCausalLM", config.format(stem), **sizes | _EXPERTS | fields),
        tokens,
        low_buffers=low_buffers,
    )


_add("mixtral", "Mixtral", output_router_logits=True)
_add("qwen2_moe", "Qwen2Moe", shared_expert_intermediate_size=12, output_router_logits=True, decoder_sparse_step=1)
_add("qwen3_moe", "Qwen3Moe", output_router_logits=True, decoder_sparse_step=1)
_add("olmoe", "Olmoe", intermediate_size=16)
_add("flex_olmo", "FlexOlmo")
_add("gpt_oss", "GptOss", sliding_window=4)
_add("deepseek_v2", "DeepseekV2", sizes=SIZES | _LATENT, topk_method="greedy")
_add("deepseek_v3", "DeepseekV3", sizes=SIZES | _LATENT)
_add(
    "llama4",
    "Llama4",
    "{}TextConfig",
    intermediate_size_mlp=24,
    num_experts_per_tok=1,
    attention_chunk_size=4,
    interleave_moe_layer_step=1,
)
_add("granitemoe", "GraniteMoe")
_add("granitemoeshared", "GraniteMoeShared", shared_intermediate_size=12)
_add("phimoe", "Phimoe", sliding_window=4)
_add("minimax", "MiniMax", block_size=4, low_buffers=True)
_add("jetmoe", "JetMoe", kv_channels=8)
_add("ernie4_5_moe", "Ernie4_5_Moe", moe_num_experts=4, moe_k=2, moe_num_shared_experts=1)
_add("glm4_moe", "Glm4Moe", n_group=1, topk_group=1, first_k_dense_replace=1)
_add("aria", "AriaText", moe_num_experts=4, moe_topk=2)
_add("afmoe", "Afmoe", sliding_window=4)
_add(
    "qwen3_next",
    "Qwen3Next",
    shared_expert_intermediate_size=12,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    layer_types=["linear_attention", "full_attention"],
)
_add("cohere2_moe", "Cohere2Moe", sliding_window=4)
