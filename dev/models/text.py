"""Language models: decoders."""

from __future__ import annotations

from typing import Any

from torch import nn

from dev.models.case import SENSITIVE, Kind, hugging_face, seeded
from dev.models.data import SIZES, VOCABULARY, tokens

__all__ = ["DECODER", "GPT2", "KIND", "LATENT"]

KIND = Kind("Language models")
DECODER: dict[str, Any] = SIZES | {
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 2,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
"""DeepSeek's attention."""
GPT2: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}


_ATTENTIONS = ["sliding_attention", "full_attention"]


def _add(
    name: str,
    stem: str,
    model: str = "{}ForCausalLM",
    config: str = "{}Config",
    sizes: dict[str, Any] = DECODER,
    low_buffers: bool = False,
    known: str = "",
    **fields: Any,
) -> None:
    build = hugging_face(model.format(stem), config.format(stem), **sizes | fields)
    KIND.add(name, build, tokens, low_buffers=low_buffers, known=known)


def _own_code() -> nn.Module:
    from dev.models.own_code import OwnConfig, OwnForCausalLM

    return OwnForCausalLM(OwnConfig(VOCABULARY))


_add("llama", "Llama")
_add("llama, tied", "Llama", tie_word_embeddings=True)
_add("qwen2", "Qwen2")
_add("qwen3", "Qwen3")
_add("mistral", "Mistral", sliding_window=4)
_add("ministral3", "Ministral3")
_add("gemma", "Gemma")
_add("gemma2", "Gemma2", sliding_window=4, query_pre_attn_scalar=8)
_add("gemma3", "Gemma3", config="{}TextConfig", sliding_window=4, query_pre_attn_scalar=8)
_add("vaultgemma", "VaultGemma")
_add("phi", "Phi")
_add("phi3", "Phi3")
_add("stablelm", "StableLm")
_add("olmo", "Olmo")
_add("olmo2", "Olmo2")
_add("olmo3", "Olmo3", sliding_window=4)
_add("granite", "Granite")
_add("cohere", "Cohere")
_add("cohere2", "Cohere2", sliding_window=4)
_add("starcoder2", "Starcoder2")
_add("glm", "Glm")
_add("glm4", "Glm4")
_add("smollm3", "SmolLM3")
_add("seed_oss", "SeedOss")
_add("ernie4_5", "Ernie4_5")
_add("exaone4", "Exaone4", sliding_window=4)
_add("helium", "Helium")
_add("apertus", "Apertus")
_add("arcee", "Arcee")
_add("nemotron", "Nemotron")
_add("persimmon", "Persimmon")
_add("hunyuan", "HunYuanDenseV1")
_add("nanochat", "NanoChat")
_add("doge", "Doge")
_add("diffllama", "DiffLlama", sizes=SIZES)
_add("bitnet", "BitNet")
_add("cwm", "Cwm", sliding_window=4)
_add("ministral", "Ministral", sliding_window=4)
_add("hyperclovax", "HyperCLOVAX")
_add("jais2", "Jais2")
_add("granite_swa", "GraniteSWA", sliding_window=4)
_add("hrm_text", "HrmText", num_hidden_layers=1, H_cycles=1, L_cycles=2)
_add(
    "cohere_compass",
    "CohereCompass",
    config="{}TextConfig",
    sliding_window=4,
    layer_types=_ATTENTIONS,
    rope_parameters={kind: {"rope_type": "default", "rope_theta": 1e4} for kind in _ATTENTIONS},
)
_add("minicpm3", "MiniCPM3", sizes=DECODER | LATENT, dim_model_base=8)
_add("youtu", "Youtu", sizes=SIZES | LATENT, pad_token_id=0)
_add(
    "gemma3n",
    "Gemma3n",
    config="{}TextConfig",
    sliding_window=4,
    hidden_size_per_layer_input=4,
    vocab_size_per_layer_input=VOCABULARY,
    laurel_rank=4,
    altup_num_inputs=2,
    num_kv_shared_layers=0,
    activation_sparsity_pattern=[0.5, 0.0],
)
_add(
    "gemma4",
    "Gemma4",
    config="{}TextConfig",
    known=SENSITIVE,
    sliding_window=4,
    global_head_dim=8,
    hidden_size_per_layer_input=4,
    vocab_size_per_layer_input=VOCABULARY,
)
_add(
    "gemma4_unified",
    "Gemma4Unified",
    config="{}TextConfig",
    known=SENSITIVE,
    sliding_window=4,
    global_head_dim=8,
)
_add("gpt2", "GPT2", "{}LMHeadModel", sizes=GPT2)
_add("gpt1", "OpenAIGPT", "{}LMHeadModel", sizes=GPT2, low_buffers=True)
_add("gptj", "GPTJ", sizes=GPT2, rotary_dim=4)
_add("codegen", "CodeGen", sizes=GPT2 | {"n_head": 4}, rotary_dim=4)
_add("gpt_bigcode", "GPTBigCode", sizes=GPT2)
_add(
    "gpt_neo",
    "GPTNeo",
    sizes={"vocab_size": VOCABULARY, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 32},
    attention_types=[[["global", "local"], 1]],
    window_size=4,
)
_add("gpt_neox", "GPTNeoX", sizes=SIZES)
_add("gpt_neox_japanese", "GPTNeoXJapanese", sizes=SIZES)
_add("opt", "OPT", sizes=SIZES | {"ffn_dim": 24, "word_embed_proj_dim": 16})
_add("opt, projected", "OPT", sizes=SIZES | {"ffn_dim": 24, "word_embed_proj_dim": 8})
_add("bloom", "Bloom", sizes={"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 2, "n_head": 2})
_add("falcon", "Falcon", sizes=SIZES, alibi=False)
_add("mpt", "Mpt", sizes={"vocab_size": VOCABULARY, "d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 32})
_add("biogpt", "BioGpt", sizes=SIZES)
_add(
    "xglm",
    "XGLM",
    sizes={"vocab_size": VOCABULARY, "d_model": 16, "ffn_dim": 24, "num_layers": 2, "attention_heads": 2},
    low_buffers=True,
)
_add("ctrl", "CTRL", "{}LMHeadModel", sizes=GPT2 | {"dff": 24})
_add(
    "xlnet",
    "XLNet",
    "{}LMHeadModel",
    sizes={"vocab_size": VOCABULARY, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24},
)
KIND.add("own code (trust_remote_code)", seeded(_own_code), tokens)
KIND.add(
    "llama, recomputed",
    hugging_face("LlamaForCausalLM", "LlamaConfig", **DECODER),
    tokens,
    sections={"activation_checkpointing": "full"},
)
