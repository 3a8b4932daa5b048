"""Experts of a mixture, of which each rank of a group has some."""

from __future__ import annotations

import torch
from torch import nn

from unishard.contract.tolerances import TOLERANCES, Tolerance
from unishard.testing.cells import Feature
from unishard.testing.models import MODELS, TestModel

_SIZE = 2
_OF_A_GROUP = TOLERANCES | {
    "bf16": Tolerance(
        5e-4,
        5e-3,
        5e-3,
        5e-2,
        "the rank of an expert rounds what the tokens of all ranks add to its gradient to bf16 at once, and results of "
        "experts are added before they are rounded",
    )
}


def _mixtral() -> nn.Module:
    """A tiny Mixtral, the same on every call."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=97,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        num_local_experts=4,
        max_position_embeddings=32,
        initializer_range=0.05,  # with less, experts hardly count; with more, rounded tokens go to other experts
        use_cache=False,
        experts_implementation="eager",  # grouped products refuse memory that is not aligned to 16 bytes
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model: nn.Module = MixtralForCausalLM(config)
        return model


FEATURES = (
    Feature(
        "experts",
        "two ranks have all experts of a Mixtral together; `parallel.expert`",
        sections={"parallel": {"expert": _SIZE}},
        models={"mixtral": TestModel(_mixtral, MODELS["llama"].sample)},
        least_ranks=_SIZE,
        tolerances=_OF_A_GROUP,
    ),
)
