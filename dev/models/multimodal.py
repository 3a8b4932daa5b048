"""Images and text together."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dev.models.case import REORDERED, Batch, Kind, drawn, hugging_face
from dev.models.data import SIZES, VOCABULARY
from dev.models.text import DECODER
from dev.models.vision import TOWER

__all__ = ["KIND"]

KIND = Kind("Multimodal models")
_TEXT: dict[str, Any] = SIZES | {
    "max_position_embeddings": 32,
    "projection_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION: dict[str, Any] = TOWER | {"projection_dim": 8}
_IMAGE_TOKEN = 60


def _pair(index: int) -> Batch:
    ids = drawn(index).integers(3, VOCABULARY, 8)
    ids[-1] = 2
    return {
        "input_ids": ids,
        "attention_mask": torch.ones(8, dtype=torch.long),
        "pixel_values": drawn(index, 1).normal(3, 16, 16),
    }


def _contrastive_loss(model: Any, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch, return_loss=True).loss
    return loss


for _name, _stem in (
    ("clip", "CLIP"),
    ("siglip", "Siglip"),
    ("chinese_clip", "ChineseCLIP"),
    ("metaclip_2", "MetaClip2"),
):
    KIND.add(
        _name,
        hugging_face(f"{_stem}Model", f"{_stem}Config", text_config=_TEXT, vision_config=_VISION, projection_dim=8),
        _pair,
        loss=_contrastive_loss,
    )
KIND.add(
    "blip",
    hugging_face(
        "BlipForConditionalGeneration",
        "BlipConfig",
        text_config=_TEXT | {"encoder_hidden_size": 16},
        vision_config=_VISION,
        projection_dim=8,
    ),
    lambda index: _pair(index) | {"labels": _pair(index)["input_ids"]},
)


def _with_image_tokens(count: int) -> Any:
    """A picture's tokens, then text."""

    def sample(index: int) -> Batch:
        ids = drawn(index).integers(3, 50, count + 4)
        ids[:count] = _IMAGE_TOKEN
        return {
            "input_ids": ids,
            "labels": ids.clone(),
            "pixel_values": drawn(index, 1).normal(3, 16, 16),
            "attention_mask": torch.ones(count + 4, dtype=torch.long),
        }

    return sample


_LLAMA: dict[str, Any] = DECODER | {"model_type": "llama", "max_position_embeddings": 64}
_CLIP: dict[str, Any] = _VISION | {"model_type": "clip_vision_model"}
KIND.add(
    "llava",
    hugging_face(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        text_config=_LLAMA,
        vision_config=_CLIP,
        image_token_index=_IMAGE_TOKEN,
        image_token_id=_IMAGE_TOKEN,
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
        image_seq_length=16,
    ),
    _with_image_tokens(16),
)
KIND.add(
    "vipllava",
    hugging_face(
        "VipLlavaForConditionalGeneration",
        "VipLlavaConfig",
        text_config=_LLAMA,
        vision_config=_CLIP,
        image_token_index=_IMAGE_TOKEN,
        image_token_id=_IMAGE_TOKEN,
        vision_feature_layers=[-1, -2],
        image_seq_length=16,
    ),
    _with_image_tokens(16),
    known=REORDERED,
)
KIND.add(
    "paligemma",
    hugging_face(
        "PaliGemmaForConditionalGeneration",
        "PaliGemmaConfig",
        text_config=DECODER | {"model_type": "gemma"},
        vision_config=_VISION | {"model_type": "siglip_vision_model", "vision_use_head": False},
        image_token_index=_IMAGE_TOKEN,
        image_token_id=_IMAGE_TOKEN,
        projection_dim=16,
    ),
    lambda index: _with_image_tokens(16)(index) | {"token_type_ids": torch.tensor([0] * 16 + [1] * 4)},
)


def _gemma3(**fields: Any) -> nn.Module:
    """Its projection starts at zero, which a norm divides by."""
    model = hugging_face("Gemma3ForConditionalGeneration", "Gemma3Config", **fields)()
    for name, parameter in model.named_parameters():
        if "mm_input_projection" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


KIND.add(
    "gemma3, multimodal",
    partial(
        _gemma3,
        text_config=DECODER | {"sliding_window": 4, "query_pre_attn_scalar": 8},
        vision_config=_VISION | {"vision_use_head": False},
        image_token_id=_IMAGE_TOKEN,
        image_token_index=_IMAGE_TOKEN,
        mm_tokens_per_image=4,
        boi_token_index=58,
        eoi_token_index=59,
    ),
    lambda index: _with_image_tokens(4)(index) | {"token_type_ids": torch.tensor([1] * 4 + [0] * 4)},
)


def _grid(index: int) -> Batch:
    """A picture of 4 x 4 patches, merged to 4 tokens."""
    ids = drawn(index).integers(3, 50, 10)
    ids[:6] = torch.tensor([55, 57, 57, 57, 57, 56])
    return {
        "input_ids": ids,
        "labels": ids.clone(),
        "pixel_values": drawn(index, 1).normal(16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([1, 4, 4]),
        "attention_mask": torch.ones(10, dtype=torch.long),
        "mm_token_type_ids": torch.tensor([0, 1, 1, 1, 1, 0, 0, 0, 0, 0]),
    }


def _grid_loss(model: Any, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch | {"pixel_values": batch["pixel_values"].flatten(0, 1)}).loss
    return loss


_MARKS: dict[str, Any] = {
    "image_token_id": 57,
    "video_token_id": 58,
    "vision_start_token_id": 55,
    "vision_end_token_id": 56,
}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
_WHOLE_ROPE = _ROPE["rope_parameters"] | {"partial_rotary_factor": 1.0}
_PATCHES = {
    "depth": 2,
    "hidden_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
}
KIND.add(
    "qwen2_vl",
    hugging_face(
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        text_config=DECODER | _ROPE,
        vision_config=_PATCHES | {"embed_dim": 16, "mlp_ratio": 2},
        **_MARKS,
    ),
    _grid,
    loss=_grid_loss,
)
KIND.add(
    "qwen2_5_vl",
    hugging_face(
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        text_config=DECODER | _ROPE,
        vision_config=_PATCHES
        | {"out_hidden_size": 16, "intermediate_size": 24, "window_size": 8, "fullatt_block_indexes": [1]},
        **_MARKS,
    ),
    _grid,
    loss=_grid_loss,
)
KIND.add(
    "qwen3_vl",
    hugging_face(
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        text_config=DECODER | _ROPE,
        vision_config=_PATCHES
        | {
            "out_hidden_size": 16,
            "intermediate_size": 24,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
        **_MARKS,
    ),
    _grid,
    loss=_grid_loss,
)
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
KIND.add(
    "qwen3_vl_moe",
    hugging_face(
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3VLMoeConfig",
        text_config=DECODER | _ROPE | _EXPERTS,
        vision_config=_PATCHES
        | {
            "out_hidden_size": 16,
            "intermediate_size": 24,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
        **_MARKS,
    ),
    _grid,
    loss=_grid_loss,
)
for _name, _stem in (("glm4v", "Glm4v"), ("glm4v_moe", "Glm4vMoe")):
    KIND.add(
        _name,
        hugging_face(
            f"{_stem}ForConditionalGeneration",
            f"{_stem}Config",
            text_config=DECODER | _EXPERTS | {"rope_parameters": _WHOLE_ROPE},
            vision_config=_PATCHES | {"out_hidden_size": 16, "intermediate_size": 24, "image_size": 16},
            image_token_id=57,
            video_token_id=58,
            image_start_token_id=55,
            image_end_token_id=56,
        ),
        _grid,
        loss=_grid_loss,
    )
KIND.add(
    "vilt",
    hugging_face(
        "ViltForQuestionAnswering",
        "ViltConfig",
        **SIZES | {"image_size": 16, "patch_size": 4, "num_labels": 5, "max_image_length": -1},
    ),
    lambda index: _pair(index) | {"labels": drawn(index, 2).normal(5).sigmoid()},
)
KIND.add(
    "layoutlm",
    hugging_face("LayoutLMForMaskedLM", "LayoutLMConfig", **SIZES | {"max_2d_position_embeddings": 32}),
    lambda index: {
        "input_ids": drawn(index).integers(3, VOCABULARY, 8),
        "labels": drawn(index, 1).integers(3, VOCABULARY, 8),
    },
)
