"""Layers of which each rank of a group has a part."""

from __future__ import annotations

from dataclasses import replace

from unishard.contract.tolerances import TOLERANCES, Tolerance
from unishard.testing.cells import STRATEGIES, Feature
from unishard.testing.features.shared_samples import SIZE, sections, trained
from unishard.testing.models import MODELS, TestModel, llama

_IN_PARTS = TOLERANCES | {
    "bf16": Tolerance(
        5e-4,
        5e-3,
        5e-3,
        5e-2,
        "what the ranks of a group make of their parts is rounded to bf16 before it is added up",
    )
}


def _llama(*, tied: bool) -> TestModel:
    """Its heads and its words divide by the size of a group."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 42, "vocab_size": 98}
    return TestModel(lambda: llama(tie_word_embeddings=tied, **sizes), MODELS["llama"].sample)


_TENSOR = Feature(
    "tensor",
    "two ranks have each layer together, also the words of a tied head; `parallel.tensor`",
    sections=sections({"tensor": SIZE}),
    least_ranks=SIZE,
    tolerances=_IN_PARTS,
    **trained({"llama": _llama(tied=True)}),
)
FEATURES = (
    _TENSOR,
    replace(
        _TENSOR,
        name="tensor_recomputed",
        about="the same with an own head, and every block recomputes its forward",
        sections=sections({"tensor": SIZE}, {"activation_checkpointing": "full"}),
        strategies=STRATEGIES[2:],
        **trained({"llama": _llama(tied=False)}),
    ),
)
