"""Long sequences, of which each rank of a group has a part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unishard.config.nested import merge
from unishard.contract.tolerances import TOLERANCES, Tolerance
from unishard.testing.cells import STRATEGIES, Feature
from unishard.testing.features.lora import lora
from unishard.testing.features.shared_samples import SIZE, sections, trained
from unishard.testing.models import MODELS, TestModel, llama

_IN_PARTS = TOLERANCES | {
    "bf16": Tolerance(
        5e-4,
        5e-3,
        5e-3,
        5e-2,
        "each rank rounds what its part of a sequence adds to a gradient to bf16, before the parts are added in fp32",
    )
}


def _packed(index: int) -> dict[str, Tensor]:
    """Two documents, with as many labels as each sample has, at its beginning or its end."""
    sample = MODELS["llama"].sample(index)
    length = len(sample["input_ids"])
    border, labels, ignored = 3 + index % 5, sample["labels"].clone(), 1 + index % 4
    labels[:ignored] = labels[length - 4 + ignored :] = -100
    positions = torch.cat([torch.arange(border), torch.arange(length - border)])
    return sample | {"labels": labels, "position_ids": positions}


def _tiny(model: str, config: str, **changes: Any) -> nn.Module:
    """A tiny causal language model of transformers, the same on every call."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 24,
        "intermediate_size": 41,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 32,
        "use_cache": False,
        "pad_token_id": 0,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        built: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**sizes | changes))
        return built


def _of(build: Callable[..., nn.Module], **changes: Any) -> TestModel:
    return TestModel(lambda: build(**changes), _packed)


_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "sdpa"}
"""They divide by the size of a group."""
_WINDOWED = _of(
    partial(_tiny, "Gemma3ForCausalLM", "Gemma3TextConfig"),
    sliding_window=4,
    layer_types=["sliding_attention", "full_attention"],
)
_STATE_SPACE = _of(
    partial(_tiny, "BambaForCausalLM", "BambaConfig"),
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.2,  # with less, positions hardly see each other
    attn_layer_indices=[1],
    mamba_n_heads=4,
    mamba_d_head=12,
    mamba_n_groups=1,
    mamba_d_state=8,
    mamba_chunk_size=4,
    eos_token_id=2,
)
_DELTA_RULE = _of(
    partial(_tiny, "Qwen3_5ForCausalLM", "Qwen3_5TextConfig"),
    initializer_range=0.05,  # with more, fp32 of one process is beyond the bounds, too, if a weight differs by 1e-7
    layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=1,
    linear_num_value_heads=3,
    linear_key_head_dim=8,
    linear_value_head_dim=6,
)


def _sections(method: str, **more: Any) -> dict[str, Any]:
    return sections({"sequence": {"size": SIZE, "method": method}}, more)


_ULYSSES = Feature(
    "ulysses",
    "two ranks share each sample of packed documents, with labels unevenly distributed over them; `parallel.sequence`",
    sections=_sections("ulysses"),
    least_ranks=SIZE,
    tolerances=_IN_PARTS,
    **trained({"llama": _of(llama, **_HEADS)}),
)
_ALLGATHER = replace(
    _ULYSSES,
    name="allgather",
    about="the same with gathered keys and values, three heads and a sliding window",
    sections=_sections("allgather"),
    **trained({"gemma3": _WINDOWED}),
)
_BY_HEADS = replace(
    _ULYSSES,
    name="recurrences_by_heads",
    about="the same with causal convolutions, and a state space (Mamba2) of which each rank has some heads; "
    "`parallel.sequence.recurrences`",
    sections=_sections("ulysses", parallel={"sequence": {"recurrences": "heads"}}),
    strategies=STRATEGIES[2:],
    **trained({"bamba": _STATE_SPACE}),
)
_BY_STATES = replace(
    _BY_HEADS,
    name="recurrences_by_states",
    about="the same with a gated delta rule of three heads, whose states are gathered, as keys and values are",
    sections=_sections("allgather", parallel={"sequence": {"recurrences": "states"}}),
    **trained({"qwen3_5": _DELTA_RULE}),
)


def _with(feature: Feature, suffix: str, about: str, sections: dict[str, Any], **changes: Any) -> Feature:
    return replace(
        feature, name=f"{feature.name}_{suffix}", about=about, sections=merge(feature.sections, sections), **changes
    )


_COMPILED = {"compile": {"mode": "per_block", "backend": "eager"}}
FEATURES = (
    _ULYSSES,
    _ALLGATHER,
    _with(_ULYSSES, "unclipped", "without clipping", {}, clip=None, strategies=STRATEGIES[2:]),
    _with(
        _ULYSSES,
        "recomputed",
        "every block recomputes its forward",
        {"activation_checkpointing": "full"},
    ),
    _with(
        _ALLGATHER,
        "recomputed",
        "recomputation keeps the outputs of products with weights",
        {"activation_checkpointing": "selective"},
        strategies=("no_shard", "full_shard"),
    ),
    _with(
        _ULYSSES,
        "offloaded",
        "parameters and optimizer in host memory",
        {"offload": "cpu"},
        strategies=("full_shard",),
    ),
    _with(
        _ALLGATHER,
        "offloaded",
        "master weights and optimizer state in host memory",
        {"offload": {"optimizer": "cpu"}},
        strategies=STRATEGIES[1:],
    ),
    _with(_ULYSSES, "compiled", "each block compiled", _COMPILED, strategies=("no_shard", "full_shard")),
    _with(_ALLGATHER, "compiled", "each block compiled", _COMPILED, strategies=("shard_grad_op", "full_shard")),
    _with(
        _ULYSSES,
        "lora",
        "fp32 adapters on a frozen fp32 base",
        {},
        precisions=("fp32",),
        **trained({"llama": _of(lora, **_HEADS)}),
    ),
    _with(
        _ALLGATHER,
        "lora_recomputed",
        "fp32 adapters on a frozen fp32 base, every block recomputes its forward",
        {"activation_checkpointing": "full"},
        precisions=("fp32",),
        **trained({"llama": _of(lora, attn_implementation="sdpa")}),
    ),
    _BY_HEADS,
    _BY_STATES,
    _with(
        _BY_STATES,
        "hybrid",
        "a state space, and hybrid sharding in groups of 2 ranks",
        {"sharding": {"group_size": 2}},
        strategies=("hybrid_shard",),
        worlds=(4,),
        **trained({"bamba": _STATE_SPACE}),
    ),
)
