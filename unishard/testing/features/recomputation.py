"""Activation checkpointing and compilation, which change only the cost of a step."""

from __future__ import annotations

from unishard.testing.cells import Feature
from unishard.testing.models import MODELS

_LLAMA = {"llama": MODELS["llama"]}

RECOMPUTATION = (
    Feature(
        "recompute_full",
        "every block recomputes its forward",
        {"activation_checkpointing": "full"},
        models=_LLAMA,
        precisions=("fp32",),
    ),
    Feature(
        "recompute_selective",
        "blocks recompute only cheap operations",
        {"activation_checkpointing": "selective"},
        models=_LLAMA,
        precisions=("bf16",),
    ),
    # A compile backend without code generation: the rest is the same, and the test is faster.
    Feature(
        "compile_per_block",
        "torch.compile of each block",
        {"compile": {"mode": "per_block", "backend": "aot_eager"}},
        precisions=("fp32",),
    ),
    Feature(
        "compile_full_and_recompute",
        "torch.compile of the root, with full activation checkpointing of its blocks",
        {"compile": {"mode": "full", "backend": "aot_eager"}, "activation_checkpointing": "full"},
        strategies=("no_shard", "full_shard"),
        precisions=("fp32",),
    ),
)
