"""Models of transformers with the loss in chunks, in one process: equal to the plain loss, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import DEEP
from models import CASES
from models.case import micro_batch

from unishard.errors import ModelError
from unishard.logits.forward import ChunkedForward

SAMPLE = (
    "llama, tied", "gemma2", "gemma3", "gemma3, multimodal", "granite", "cohere", "llama4", "gpt_oss", "mixtral",
    "gpt2", "bert", "t5", "bart", "llava", "mamba",
)  # fmt: skip
"""Of `CASES`, which all run with `--deep`: heads, scales, caps, towers, experts, encoders and decoders."""
REFUSED = {"prophetnet": "transpose", "fsmt": "add"}


def gradients(name: str, chunk_tokens: int | None) -> tuple[float, dict[str, Any]]:
    case = CASES[name]
    model = case.build().train()
    if chunk_tokens is not None:
        ChunkedForward(model, chunk_tokens)
    torch.manual_seed(1)
    loss = case.loss(model, micro_batch(case, 0, 0, 1))
    loss.backward()
    return loss.item(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.filterwarnings("ignore:training.loss_chunk_tokens does nothing")
@pytest.mark.parametrize("name", CASES if DEEP else SAMPLE)
def test_a_model_is_the_same_in_chunks(name):
    loss, plain = gradients(name, None)
    if name in REFUSED:
        pytest.skip("refused")
    try:
        in_chunks, own = gradients(name, 3)
    except ModelError as error:
        if "has no head" not in str(error):
            raise
        pytest.skip("no head")
    assert in_chunks == pytest.approx(loss, rel=1e-6)
    assert own.keys() == plain.keys()
    largest = max(float(each.abs().max()) for each in plain.values())
    for key, each in plain.items():
        torch.testing.assert_close(own[key], each, rtol=0, atol=1e-5 * max(float(each.abs().max()), 1e-2 * largest))


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_does_more_to_its_logits_is_refused_by_name(name):
    with pytest.raises(ModelError, match=f"{REFUSED[name]} on its logits, .* leave training.loss_chunk_tokens out"):
        gradients(name, 3)
