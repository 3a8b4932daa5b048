"""Speech."""

from __future__ import annotations

from typing import Any

from dev.models.case import REORDERED, Batch, Kind, drawn, hugging_face
from dev.models.data import SIZES, VOCABULARY, audio
from dev.models.encoder_decoder import BART

__all__ = ["KIND", "WAVES"]

KIND = Kind("Speech")
WAVES: dict[str, Any] = SIZES | {
    "conv_dim": (8, 8),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "num_labels": 2,
    "classifier_proj_size": 8,
    "pad_token_id": 0,
}
_WHISPER: dict[str, Any] = BART | {
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "max_target_positions": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}


def _spoken(index: int) -> Batch:
    return {"input_features": drawn(index).normal(8, 40), "labels": drawn(index, 1).integers(3, VOCABULARY, 6)}


def _spectrum(index: int) -> Batch:
    return _spoken(index) | {"input_features": drawn(index).normal(40, 8)}


def _text_of_audio(index: int) -> Batch:
    return {"input_values": drawn(index).normal(400), "labels": drawn(index, 1).integers(3, VOCABULARY, 4)}


def _classifier(name: str, stem: str, *, low_buffers: bool = False, **fields: Any) -> None:
    KIND.add(
        name,
        hugging_face(f"{stem}ForSequenceClassification", f"{stem}Config", **WAVES | fields),
        audio,
        low_buffers=low_buffers,
    )


_classifier("wav2vec2", "Wav2Vec2")
_classifier("hubert", "Hubert")
_classifier("wavlm", "WavLM")
_classifier("unispeech", "UniSpeech")
_classifier("unispeech_sat", "UniSpeechSat")
_classifier("sew", "SEW", squeeze_factor=2)
_classifier("data2vec_audio", "Data2VecAudio", conv_pos_kernel_size=3)
_classifier("wav2vec2_conformer", "Wav2Vec2Conformer", conv_depthwise_kernel_size=3, low_buffers=True)
KIND.add("wav2vec2, ctc", hugging_face("Wav2Vec2ForCTC", "Wav2Vec2Config", **WAVES), _text_of_audio)
KIND.add("whisper", hugging_face("WhisperForConditionalGeneration", "WhisperConfig", **_WHISPER), _spoken)
KIND.add(
    "speech_to_text",
    hugging_face(
        "Speech2TextForConditionalGeneration",
        "Speech2TextConfig",
        **_WHISPER
        | {
            "input_feat_per_channel": 8,
            "conv_channels": 8,
            "max_source_positions": 40,
            "num_conv_layers": 2,
            "conv_kernel_sizes": (3, 3),
        },
    ),
    _spectrum,
    low_buffers=True,
    known=REORDERED,
)
KIND.add(
    "audio_spectrogram_transformer",
    hugging_face(
        "ASTForAudioClassification",
        "ASTConfig",
        **SIZES
        | {
            "patch_size": 4,
            "num_mel_bins": 8,
            "max_length": 40,
            "frequency_stride": 4,
            "time_stride": 4,
            "num_labels": 2,
        },
    ),
    lambda index: {"input_values": drawn(index).normal(40, 8), "labels": audio(index)["labels"]},
)
KIND.add(
    "moonshine",
    hugging_face(
        "MoonshineForConditionalGeneration",
        "MoonshineConfig",
        **SIZES
        | {
            "encoder_num_hidden_layers": 2,
            "decoder_num_hidden_layers": 2,
            "encoder_num_attention_heads": 2,
            "decoder_num_attention_heads": 2,
            "pad_token_id": 0,
            "decoder_start_token_id": 1,
        },
    ),
    lambda index: {"input_values": drawn(index).normal(1600), "labels": drawn(index, 1).integers(3, VOCABULARY, 6)},
    known=REORDERED,
)
