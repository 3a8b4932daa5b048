"""Models of transformers with the loss in chunks, in one process: equal to the plain loss, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import DEEP

from dev.models import CASES
from dev.models.chunked import EQUAL, HEADLESS, REFUSED, compare
from dev.models.rows import read

ROWS = {row.name: row for row in read(Path(__file__).parents[2] / "docs" / "models-tested.csv")}
SAMPLE = (
    "llama, tied", "gemma2", "gemma3", "gemma3, multimodal", "granite", "cohere", "llama4", "gpt_oss", "mixtral",
    "gpt2", "bert", "t5", "bart", "llava", "mamba", "prophetnet", "fsmt", "vit",
)  # fmt: skip
"""Of `CASES`, which all run with `--deep`: heads, scales, caps, towers, experts, encoders, decoders, and refusals."""


@pytest.mark.parametrize("name", CASES if DEEP else SAMPLE)
def test_a_model_is_the_same_in_chunks_or_what_its_row_says(name):
    assert compare(name) == ROWS[name].chunked


def test_no_model_differs_in_silence_in_chunks_or_ends_with_an_error_of_another():
    known = [row.chunked in (EQUAL, HEADLESS) or row.chunked.startswith(REFUSED) for row in ROWS.values()]
    assert all(known), "run make models"
    assert sum(row.chunked == EQUAL for row in ROWS.values()) >= 160
