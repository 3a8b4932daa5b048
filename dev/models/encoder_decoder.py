"""Encoder-decoder models of text."""

from __future__ import annotations

from typing import Any

from dev.models.case import REORDERED, Kind, drawn, hugging_face
from dev.models.data import LENGTH, VOCABULARY, sequence_pair, tokens

__all__ = ["BART", "KIND"]

KIND = Kind("Encoder-decoder models")
_T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
BART: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}


def _add(
    name: str,
    stem: str,
    model: str = "{}ForConditionalGeneration",
    sizes: dict[str, Any] = BART,
    low_buffers: bool = False,
    known: str = "",
    **fields: Any,
) -> None:
    build = hugging_face(model.format(stem), f"{stem}Config", **sizes | fields)
    KIND.add(name, build, sequence_pair, low_buffers=low_buffers, known=known)


_add("t5", "T5", known=REORDERED, sizes=_T5)
_add("t5, gated", "T5", known=REORDERED, sizes=_T5, feed_forward_proj="gated-gelu")
_add("mt5", "MT5", known=REORDERED, sizes=_T5, tie_word_embeddings=False)
_add("umt5", "UMT5", known=REORDERED, sizes=_T5)
_add("longt5", "LongT5", known=REORDERED, sizes=_T5, local_radius=2, encoder_attention_type="local")
_add(
    "switch_transformers",
    "SwitchTransformers",
    sizes=_T5,
    num_experts=4,
    num_sparse_encoder_layers=1,
    num_sparse_decoder_layers=1,
)
_add("bart", "Bart")
_add("mbart", "MBart")
_add("pegasus", "Pegasus")
_add("pegasus_x", "PegasusX", block_size=4, num_global_tokens=2)
_add("bigbird_pegasus", "BigBirdPegasus", known=REORDERED, attention_type="original_full")
_add("blenderbot", "Blenderbot", known=REORDERED)
_add("m2m_100", "M2M100", low_buffers=True)
_add("marian", "Marian", "{}MTModel")
_add("mvp", "Mvp")
_add("plbart", "PLBart")
_add(
    "led",
    "LED",
    known=REORDERED,
    attention_window=4,
    max_encoder_position_embeddings=32,
    max_decoder_position_embeddings=32,
)
_add(
    "nllb_moe",
    "NllbMoe",
    num_experts=4,
    encoder_sparse_step=2,
    decoder_sparse_step=2,
    expert_capacity=16,
    low_buffers=True,
)
_add(
    "prophetnet",
    "ProphetNet",
    sizes={
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "num_encoder_attention_heads": 2,
        "num_decoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
        "ngram": 2,
    },
)
KIND.add(
    "fsmt",
    hugging_face(
        "FSMTForConditionalGeneration",
        "FSMTConfig",
        **BART | {"src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY, "langs": ["en", "de"]},
    ),
    lambda index: tokens(index) | {"labels": drawn(index, 1).integers(3, VOCABULARY, LENGTH)},
)
