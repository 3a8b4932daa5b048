"""Encoders of text."""

from __future__ import annotations

from typing import Any

from dev.models.case import REORDERED, Kind, hugging_face
from dev.models.data import SIZES, VOCABULARY, labeled, masked

__all__ = ["KIND"]

KIND = Kind("Encoders of text")


def _add(
    name: str,
    stem: str,
    model: str = "{}ForMaskedLM",
    sizes: dict[str, Any] = SIZES,
    low_buffers: bool = False,
    known: str = "",
    **fields: Any,
) -> None:
    build = hugging_face(model.format(stem), f"{stem}Config", **sizes | fields)
    KIND.add(name, build, masked, low_buffers=low_buffers, known=known)


_add("bert", "Bert")
KIND.add("bert, classifier", hugging_face("BertForSequenceClassification", "BertConfig", **SIZES), labeled)
_add("roberta", "Roberta", max_position_embeddings=40)
_add("roberta_prelayernorm", "RobertaPreLayerNorm", max_position_embeddings=40)
_add("xlm_roberta", "XLMRoberta", max_position_embeddings=40)
_add("xlm_roberta_xl", "XLMRobertaXL", max_position_embeddings=40)
_add("camembert", "Camembert", max_position_embeddings=40)
_add("data2vec", "Data2VecText", max_position_embeddings=40)
_add("deberta", "Deberta", relative_attention=True, pos_att_type=["p2c", "c2p"])
_add(
    "deberta_v2",
    "DebertaV2",
    known=REORDERED,
    relative_attention=True,
    pos_att_type=["p2c", "c2p"],
    position_buckets=8,
    share_att_key=True,
    norm_rel_ebd="layer_norm",
    conv_kernel_size=3,
)
_add("albert", "Albert", embedding_size=8, num_hidden_layers=3)
_add("electra", "Electra", embedding_size=8)
_add(
    "distilbert",
    "DistilBert",
    sizes={
        "vocab_size": VOCABULARY,
        "dim": 16,
        "hidden_dim": 24,
        "n_layers": 2,
        "n_heads": 2,
        "max_position_embeddings": 32,
    },
)
_add("modernbert", "ModernBert", pad_token_id=0)
_add("eurobert", "EuroBert", pad_token_id=0)
_add("ultrabert", "Ultrabert", pad_token_id=0, sliding_window=4, prediction_head_size=16)
_add("neomme", "NeoMME", pad_token_id=0, num_key_value_heads=1, head_dim=16, embedding_rank=8, sliding_window=4)
_add("esmc", "Esmc", pad_token_id=0)
_add("nomic_bert", "NomicBert")
_add("longformer", "Longformer", attention_window=4, pad_token_id=0)
_add("big_bird", "BigBird", attention_type="original_full")
_add("nystromformer", "Nystromformer", num_landmarks=4, segment_means_seq_len=8)
_add("fnet", "FNet")
_add("convbert", "ConvBert", embedding_size=8, head_ratio=2)
_add("roformer", "RoFormer", embedding_size=16)
_add("rembert", "RemBert", input_embedding_size=8, output_embedding_size=12)
_add("mpnet", "MPNet")
_add("megatron_bert", "MegatronBert")
_add("ernie", "Ernie")
_add("esm", "Esm", pad_token_id=0, mask_token_id=1, position_embedding_type="rotary")
_add("ibert", "IBert")
_XLM = {"vocab_size": VOCABULARY, "emb_dim": 16, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 32}
_add("xlm", "XLM", "{}WithLMHeadModel", _XLM, known=REORDERED)
_add("flaubert", "Flaubert", "{}WithLMHeadModel", _XLM, known=REORDERED)
_add("yoso", "Yoso")
