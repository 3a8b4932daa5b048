"""Activation checkpointing and compilation, which change what a step costs and nothing else."""

from __future__ import annotations

from unishard.testing.cells import Feature
from unishard.testing.models import MODELS

__all__ = ["FEATURES"]

_LLAMA = {"llama": MODELS["llama"]}

FEATURES = (
    Feature(
        "recompute_full", "every block runs its forward twice", {"activation_checkpointing": "full"}, models=_LLAMA, precisions=("fp32",)
    ),
    Feature(
        "recompute_selective",
        "blocks run again what is cheap",
        {"activation_checkpointing": "selective"},
        models=_LLAMA,
        precisions=("bf16",),
    ),
    # The backend that makes no kernels: everything but the code that is generated is the same, and a test need not wait for it.
    Feature(
        "compile_per_block", "torch.compile of each block", {"compile": {"mode": "per_block", "backend": "aot_eager"}}, precisions=("fp32",)
    ),
    Feature(
        "compile_full_and_recompute",
        "torch.compile of the root, whose blocks run twice",
        {"compile": {"mode": "full", "backend": "aot_eager"}, "activation_checkpointing": "full"},
        strategies=("no_shard", "full_shard"),
        precisions=("fp32",),
    ),
)
