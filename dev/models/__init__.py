"""Models that people train: architectures of transformers, and habits of own modules. `make models` plays them all."""

from __future__ import annotations

from dev.models import encoder_decoder, encoders, moe, multimodal, speech, state_space, text, vision
from dev.models.case import Case, Kind
from dev.models.habits import HABITS

__all__ = ["CASES", "KINDS"]

KINDS: tuple[Kind, ...] = (
    text.KIND,
    moe.KIND,
    state_space.KIND,
    encoders.KIND,
    encoder_decoder.KIND,
    speech.KIND,
    vision.KIND,
    multimodal.KIND,
    *HABITS,
)
CASES: dict[str, Case] = {case.name: case for kind in KINDS for case in kind.cases}
