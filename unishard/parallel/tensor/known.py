"""Plans of transformers that are not right, by the type of the model."""

from __future__ import annotations

from collections.abc import Mapping

_PARTS = "replicated_with_grad_allreduce"

ADDED: Mapping[str, Mapping[str, str]] = {
    "apertus": {"layers.*.mlp.act_fn": _PARTS},  # has parameters
    "esmc": {  # norms over the features of all heads
        **dict.fromkeys((f"layers.*.self_attn.{each}_proj" for each in "qkv"), "colwise_gather_output"),
        "layers.*.self_attn.o_proj": "rowwise_split_input",
    },
    "inkling_text": {
        "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
        "layers.*.mlp.shared_experts": "moe_tp_experts",  # their inputs too
    },
    "inkling2_text": {"layers.*.mlp.experts.gate_up_proj": "packed_colwise"},
    "qwen3_vl_moe_text": dict.fromkeys(("layers.*.self_attn.q_norm", "layers.*.self_attn.k_norm"), _PARTS),
    "gpt_oss": {  # has no plan; gate and up alternate along the last dimension
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.sinks": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.experts": "moe_tp_experts",
        "layers.*.mlp.experts.gate_up_proj": "rowwise",
        "layers.*.mlp.experts.gate_up_proj_bias": "rowwise",
        "layers.*.mlp.experts.down_proj": "colwise",
        "layers.*.mlp.experts.down_proj_bias": "added_once",
    },
}
"""What belongs to them, in place of what they say."""
REFUSED: Mapping[str, str] = {
    "doge": "its dynamic mask mixes the value heads of all ranks",
    "neomme": "its value embeddings, and the scales of its heads, are those of all heads",
}
"""Why they cannot be used."""
