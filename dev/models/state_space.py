"""State-space and recurrent language models, and mixtures of them with attention."""

from __future__ import annotations

from typing import Any

from dev.models.case import Kind, hugging_face
from dev.models.data import VOCABULARY, tokens
from dev.models.text import DECODER

__all__ = ["KIND"]

KIND = Kind("State-space and recurrent language models")
_SMALL: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2}


_RESIDUAL = (
    "bf16: the blocks pass each other an fp32 residual, which units cast; equal with `precision.cast_inputs: false`"
)


def _add(
    name: str, stem: str, sizes: dict[str, Any] = DECODER, low_buffers: bool = False, known: str = "", **fields: Any
) -> None:
    build = hugging_face(f"{stem}ForCausalLM", f"{stem}Config", **sizes | fields)
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
