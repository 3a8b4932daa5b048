"""Vision."""

from __future__ import annotations

from typing import Any

import torch

from dev.models.case import Batch, Kind, drawn, hugging_face
from dev.models.data import image

__all__ = ["KIND", "TOWER"]

KIND = Kind("Vision")
TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
_STAGES: dict[str, Any] = {
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "num_stages": 2,
    "image_size": 32,
    "patch_size": 4,
}
_WINDOWS: dict[str, Any] = {
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [2, 2],
    "num_heads": [2, 2],
    "window_size": 2,
}


def _add(
    name: str,
    stem: str,
    sizes: dict[str, Any] = TOWER,
    size: int = 16,
    *,
    low_buffers: bool = False,
    **fields: Any,
) -> None:
    build = hugging_face(f"{stem}ForImageClassification", f"{stem}Config", **sizes | {"num_labels": 5} | fields)
    KIND.add(name, build, image(size), low_buffers=low_buffers)


_add("vit", "ViT")
_add("deit", "DeiT")
_add("dinov2", "Dinov2")
_add("dinov2_with_registers", "Dinov2WithRegisters")
_add("ijepa", "IJepa")
_add("vit_msn", "ViTMSN")
_add("beit", "Beit", use_relative_position_bias=True)
_add("data2vec_vision", "Data2VecVision")
_add("swin", "Swin", _WINDOWS)
_add("swinv2", "Swinv2", _WINDOWS, low_buffers=True)
_add(
    "focalnet",
    "FocalNet",
    {
        "image_size": 16,
        "patch_size": 2,
        "embed_dim": 8,
        "depths": [1, 1],
        "hidden_sizes": [8, 16],
        "focal_levels": [2, 2],
        "focal_windows": [3, 3],
    },
)
_add("convnext", "ConvNext", _STAGES, 32)
_add("convnextv2", "ConvNextV2", _STAGES, 32)
_add(
    "resnet",
    "ResNet",
    {"hidden_sizes": [8, 16], "depths": [2, 2], "embedding_size": 8, "layer_type": "basic"},
    32,
    low_buffers=True,
)
_add(
    "regnet",
    "RegNet",
    {"hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8, "groups_width": 4},
    32,
    low_buffers=True,
)
_add(
    "segformer",
    "Segformer",
    {
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "num_encoder_blocks": 2,
        "num_attention_heads": [1, 2],
        "sr_ratios": [2, 1],
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "mlp_ratios": [2, 2],
        "decoder_hidden_size": 8,
    },
    32,
)
_add(
    "poolformer",
    "PoolFormer",
    {
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "num_encoder_blocks": 2,
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "padding": [2, 1],
        "mlp_ratio": 2.0,
    },
    32,
)


def _noised(index: int) -> Batch:
    """With the noise by which a masked autoencoder chooses patches, which it would draw."""
    return {
        "pixel_values": drawn(index).normal(3, 16, 16),
        "noise": torch.rand(16, generator=drawn(index, 1).generator()),
    }


KIND.add(
    "vit_mae",
    hugging_face(
        "ViTMAEForPreTraining",
        "ViTMAEConfig",
        **TOWER
        | {
            "decoder_hidden_size": 16,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 24,
        },
    ),
    _noised,
)
KIND.add(
    "segformer, segmentation",
    hugging_face(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        hidden_sizes=[8, 16],
        depths=[1, 1],
        num_encoder_blocks=2,
        num_attention_heads=[1, 2],
        sr_ratios=[2, 1],
        patch_sizes=[7, 3],
        strides=[4, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=8,
        num_labels=5,
    ),
    lambda index: {"pixel_values": drawn(index).normal(3, 32, 32), "labels": drawn(index, 1).integers(0, 5, 32, 32)},
    low_buffers=True,
)
