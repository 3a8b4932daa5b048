"""State-space and recurrent language models, and mixtures of them with attention."""

from __future__ import annotations

from typing import Any

from dev.models.case import REORDERED, Kind, hugging_face
from dev.models.data import SIZES, VOCABULARY, tokens
from dev.models.text import DECODER

__all__ = ["KIND"]

KIND = Kind("State-space and recurrent language models")
_SMALL: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2}


_RESIDUAL = (
    "bf16: the blocks pass each other an fp32 residual, which units cast; equal with `precision.cast_inputs: false`"
)


def _add(
    name: str,
    stem: str,
    sizes: dict[str, Any] = DECODER,
    config: str = "{}Config",
    low_buffers: bool = False,
    known: str = "",
    **fields: Any,
) -> None:
    build = hugging_face(f"{stem}ForCausalLM", config.format(stem), **sizes | fields)
    KIND.add(name, build, tokens, low_buffers=low_buffers, known=known)


_add("mamba", "Mamba", _SMALL, known=_RESIDUAL, state_size=4, use_mambapy=False)
_add("falcon_mamba", "FalconMamba", _SMALL, known=_RESIDUAL, state_size=4)
_add("mamba2", "Mamba2", _SMALL, known=_RESIDUAL, state_size=4, num_heads=4, head_dim=8, n_groups=1, chunk_size=4)
_add("rwkv", "Rwkv", _SMALL, attention_hidden_size=16, intermediate_size=24, context_length=16)
_add(
    "recurrent_gemma",
    "RecurrentGemma",
    lru_width=16,
    attention_window_size=4,
    block_types=("recurrent", "attention"),
    use_cache=False,
)
_add(
    "jamba",
    "Jamba",
    mamba_d_state=4,
    mamba_d_conv=2,
    mamba_expand=2,
    attn_layer_period=2,
    attn_layer_offset=1,
    expert_layer_period=2,
    expert_layer_offset=1,
    num_experts=2,
    use_mamba_kernels=False,
)
_add(
    "bamba",
    "Bamba",
    attn_layer_indices=[1],
    mamba_n_heads=4,
    mamba_d_head=8,
    mamba_d_state=4,
    mamba_n_groups=1,
    mamba_chunk_size=4,
    mamba_expand=2,
)
_add("lfm2", "Lfm2", layer_types=["conv", "full_attention"])
_add("olmo_hybrid", "OlmoHybrid")
_add(
    "xlstm",
    "xLSTM",
    {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "embedding_dim": 16,
        "num_hidden_layers": 2,
        "num_blocks": 2,
        "num_heads": 2,
    },
    use_cache=False,
    chunkwise_kernel="chunkwise--native_autograd",
    mode="train",
    chunk_size=4,
)
_add("falcon_h1", "FalconH1", mamba_d_ssm=16, mamba_n_heads=2, mamba_d_head=8, mamba_d_state=4, mamba_chunk_size=4)
_LAYERS = ["linear_attention", "full_attention"]
_DELTA_RULE: dict[str, Any] = {
    "layer_types": _LAYERS,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT: dict[str, Any] = {
    **SIZES,
    **_EXPERTS,
    "layer_types": _LAYERS,
    "num_key_value_heads": 2,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
_SHARED_BLOCKS: dict[str, Any] = SIZES | {
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    "mamba_d_state": 4,
}
_add("qwen3_5", "Qwen3_5", config="{}TextConfig", **_DELTA_RULE)
_add(
    "qwen3_5_moe",
    "Qwen3_5Moe",
    DECODER | _DELTA_RULE | _EXPERTS,
    config="{}TextConfig",
    num_experts=4,
    shared_expert_intermediate_size=12,
)
_add("kimi_linear", "KimiLinear", _LATENT, linear_num_heads=2, linear_head_dim=8, bos_token_id=1)
_add("bailing_hybrid", "BailingHybrid", _LATENT, num_mtp_layers=0, head_dim=8)
_add(
    "nemotron_h",
    "NemotronH",
    DECODER | _EXPERTS,
    layers_block_type=["mamba", "attention", "moe"],
    ssm_state_size=4,
    mamba_num_heads=4,
    mamba_head_dim=8,
    n_groups=2,
    chunk_size=4,
    moe_shared_expert_intermediate_size=12,
)
_add(
    "granitemoehybrid",
    "GraniteMoeHybrid",
    DECODER | _EXPERTS,
    layer_types=["mamba", "attention"],
    shared_intermediate_size=12,
    mamba_n_heads=4,
    mamba_d_head=8,
    mamba_d_state=4,
    mamba_chunk_size=4,
)
_add("zamba", "Zamba", _SHARED_BLOCKS, mamba_dt_rank=4)
_add("zamba2", "Zamba2", _SHARED_BLOCKS, n_mamba_heads=4, mamba_headdim=8, chunk_size=4, adapter_rank=4)
_add(
    "lfm2_moe",
    "Lfm2Moe",
    DECODER | _EXPERTS,
    layer_types=["conv", "full_attention"],
    num_experts=4,
    num_dense_layers=1,
)
_add("lfm3", "Lfm3", layer_types=["conv", "full_attention"], use_cache=False)
_add(
    "inkling",
    "Inkling",
    DECODER | _EXPERTS,
    config="{}TextConfig",
    n_routed_experts=4,
    layer_types=["hybrid", "hybrid_sliding"],
    mlp_layer_types=["dense", "sparse"],
    swa_num_attention_heads=2,
    swa_num_key_value_heads=1,
    swa_head_dim=8,
    sliding_window_size=4,
    d_rel=4,
    rel_extent=16,
)
_add(
    "inkling2",
    "Inkling2",
    DECODER | _EXPERTS,
    config="{}TextConfig",
    known=REORDERED,
    n_routed_experts=4,
    layer_types=["hybrid", "hybrid_sliding"],
    swa_num_attention_heads=2,
    swa_num_key_value_heads=1,
    swa_head_dim=8,
    sliding_window_size=4,
    d_rel=4,
    rel_extent=16,
    n_layers_per_attn_res_block=1,
    unpadded_vocab_size=VOCABULARY,
)
_add(
    "qwen4_exp",
    "Qwen4Exp",
    DECODER | _DELTA_RULE | _EXPERTS,
    config="{}TextConfig",
    num_experts=4,
    shared_expert_intermediate_size=12,
    hc_count=2,
    hc_lowrank=4,
    indexer_n_heads=2,
    indexer_kv_heads=1,
    indexer_head_dim=8,
    indexer_budget=4,
    indexer_compress_ratio=2,
)
