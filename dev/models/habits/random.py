"""Modules that draw: each rank its own numbers, as processes of plain torch do."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dev.models.case import Kind, hugging_face
from dev.models.data import SIZES, audio, masked, sequence_pair, tokens
from dev.models.encoder_decoder import BART
from dev.models.habits.blocks import Block, add
from dev.models.speech import WAVES
from dev.models.text import GPT2

__all__ = ["KIND"]

KIND = Kind("Dropout and LayerDrop")


class _Dropout(Block):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.drop(x))


class _LayerDrop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand(()) >= 0.4 or not self.training:
                x = layer(x)
        return x


_BART = BART | {"encoder_layers": 3}
add(KIND, "dropout", lambda: nn.Sequential(_Dropout(), _Dropout()))
add(
    KIND,
    "dropout, recomputed",
    lambda: nn.Sequential(_Dropout(), _Dropout()),
    sections={"activation_checkpointing": "full"},
)
add(KIND, "LayerDrop", _LayerDrop)
add(KIND, "LayerDrop, conditional_modules", _LayerDrop, sections={"sharding": {"conditional_modules": ["Block"]}})
KIND.add(
    "gpt2 with dropout",
    hugging_face("GPT2LMHeadModel", "GPT2Config", random={"resid_pdrop": 0.2, "embd_pdrop": 0.2}, **GPT2),
    tokens,
)
KIND.add(
    "bert with dropout",
    hugging_face("BertForMaskedLM", "BertConfig", random={"hidden_dropout_prob": 0.2}, **SIZES),
    masked,
)
KIND.add(
    "bart with LayerDrop, conditional_modules",
    hugging_face("BartForConditionalGeneration", "BartConfig", random={"encoder_layerdrop": 0.4}, **_BART),
    sequence_pair,
    sections={"sharding": {"conditional_modules": ["BartEncoderLayer"]}},
)
for _name, _sections in (
    ("wav2vec2 with LayerDrop", {}),
    ("wav2vec2 with LayerDrop, conditional_modules", {"sharding": {"conditional_modules": ["Wav2Vec2EncoderLayer"]}}),
):
    KIND.add(
        _name,
        hugging_face(
            "Wav2Vec2ForSequenceClassification",
            "Wav2Vec2Config",
            random={"layerdrop": 0.4},
            **WAVES | {"num_hidden_layers": 3},
        ),
        audio,
        sections=_sections,
    )
