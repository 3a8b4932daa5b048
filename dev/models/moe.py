"""Mixtures of experts."""

from __future__ import annotations

from typing import Any

from dev.models.case import SENSITIVE, Kind, hugging_face
from dev.models.data import SIZES, tokens
from dev.models.text import DECODER, LATENT

__all__ = ["KIND"]

KIND = Kind("Mixtures of experts")
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_LATENT: dict[str, Any] = LATENT | {
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
    known: str = "",
    **fields: Any,
) -> None:
    build = hugging_face(f"{stem}ForCausalLM", config.format(stem), **sizes | _EXPERTS | fields)
    KIND.add(name, build, tokens, low_buffers=low_buffers, known=known)


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
_GROUPS: dict[str, Any] = {"n_group": 1, "topk_group": 1}
_ONE_DENSE: dict[str, Any] = {"mlp_layer_types": ["dense", "sparse"]}
_CHOSEN: dict[str, Any] = SIZES | _LATENT | _GROUPS | {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 2}
"""DeepSeek's sparse attention: an indexer chooses the positions that a token sees."""
_add("beam", "Beam", sizes=DECODER | _GROUPS | _ONE_DENSE, sliding_window=4)
_add("dots1", "Dots1", n_shared_experts=1, first_k_dense_replace=1)
_add("exaone_moe", "ExaoneMoe", sliding_window=4)
_add("flint", "Flint", sliding_window=4, shared_expert_intermediate_size=12, mlp_only_layers=[0])
_add("granitemoe_swa", "GraniteMoeSWA", sliding_window=4, shared_intermediate_size=12)
_add("hunyuan_moe", "HunYuanMoEV1", moe_topk=2)
_add("hy_v3", "HYV3", sizes=DECODER | _ONE_DENSE)
_add("hy_v4", "HYV4", sizes=_CHOSEN | _ONE_DENSE, hc_mult=2, indexer_types=["full", "shared"])
_add("kolibri1", "Kolibri1", sliding_window=4, shared_expert_intermediate_size=12)
_add("laguna", "Laguna", shared_expert_intermediate_size=12)
_add("mellum", "Mellum", sizes=DECODER | _ONE_DENSE, sliding_window=4)
_add("minimax_m2", "MiniMaxM2")
_add("mimo_v2_flash", "MiMoV2Flash", sliding_window=4, v_head_dim=4, num_attention_heads=4)
_add("solar_open", "SolarOpen", n_shared_experts=1)
_add("mistral4", "Mistral4", sizes=SIZES | _LATENT | _GROUPS)
_add("glm4_moe_lite", "Glm4MoeLite", sizes=SIZES | _LATENT | _GROUPS)
_add("axk1", "AXK1", sizes=SIZES | _LATENT)
_add("axk2", "AXK2", sizes=_CHOSEN, gated_norm_rank=4)
_add("deepseek_v32", "DeepseekV32", sizes=_CHOSEN)
_add("glm_moe_dsa", "GlmMoeDsa", sizes=_CHOSEN)
_add("dots3_note", "Dots3Note", sizes=_CHOSEN, config="{}TextConfig", shared_experts_intermediate_size=12)
_add(
    "deepseek_v4",
    "DeepseekV4",
    q_lora_rank=8,
    n_shared_experts=1,
    layer_types=["heavily_compressed_attention", "compressed_sparse_attention"],
    compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    mlp_layer_types=["hash_moe", "moe"],
    hc_mult=2,
    hc_sinkhorn_iters=3,
    sliding_window=4,
    o_groups=2,
    o_lora_rank=4,
    index_n_heads=2,
    index_head_dim=8,
    index_topk=2,
    partial_rotary_factor=0.5,
    num_nextn_predict_layers=0,
)
_add(
    "longcat_flash",
    "LongcatFlash",
    head_dim=4,
    sizes=SIZES | LATENT,
    ffn_hidden_size=24,
    expert_ffn_hidden_size=16,
    moe_topk=2,
    zero_expert_num=2,
)
_add(
    "gemma4, experts",
    "Gemma4",
    config="{}TextConfig",
    known=SENSITIVE,
    sliding_window=4,
    global_head_dim=8,
    hidden_size_per_layer_input=0,
    enable_moe_block=True,
    top_k_experts=2,
)
