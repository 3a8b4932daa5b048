"""Features that only a setting turns on: strategies, offload, number formats, recomputation; and validation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

import unishard
from unishard.config.nested import merge
from unishard.testing.cells import STRATEGIES, Cell, Feature, Recorder
from unishard.testing.features import access, accumulation
from unishard.testing.models import MODELS, TestModel
from unishard.testing.oracle import Curve

PLAIN = (Feature("plain", "the loop of the README", models=MODELS),)


# -- Hybrid sharding: each group of ranks holds a copy of the model --------------------------------

_HYBRID = ("hybrid_shard", "hybrid_shard_grad_op")
_GROUPS = {"sharding": {"group_size": 2}}

SHARDING = (
    Feature(
        "hybrid",
        "hybrid sharding in groups of 2 ranks",
        _GROUPS,
        models=MODELS,
        strategies=_HYBRID,
        worlds=(4,),
        accumulation=3,
    ),
    Feature(
        "one_group",
        "hybrid sharding with one group of all ranks",
        strategies=_HYBRID,
        precisions=("fp32",),
        worlds=(1, 2),
        accumulation=1,
        clip=None,
    ),
    *(
        replace(
            feature,
            name=f"hybrid_{feature.name}",
            about=f"{feature.about}, with hybrid sharding in groups of 2 ranks",
            sections=merge(feature.sections, _GROUPS),
            models={"mlp": MODELS["mlp"]},
            strategies=_HYBRID,
            worlds=(4,),
        )
        for feature in (*accumulation.FEATURES, *access.FEATURES)
        if feature.strategies == STRATEGIES
    ),
)


# -- Parameters and optimizer in host memory; `nvme` needs a library that may not be installed -----

_ADAMW = {"name": "adamw", "lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}
_PARAMS, _OPTIMIZER, _BOTH = {"params": "cpu"}, {"optimizer": "cpu"}, {"params": "cpu", "optimizer": "cpu"}

OFFLOAD = (
    Feature(
        "offload",
        "parameters and optimizer in host memory",
        {"offload": _BOTH},
        strategies=("full_shard",),
        worlds=(1, 2, 4),
    ),
    Feature(
        "offload_adamw", "the same with AdamW", {"offload": _BOTH, "optimizer": _ADAMW}, strategies=("full_shard",)
    ),
    Feature("offload_optimizer", "the optimizer in host memory", {"offload": _OPTIMIZER}, strategies=STRATEGIES[1:]),
    Feature(
        "offload_optimizer_adamw",
        "the same with AdamW",
        {"offload": _OPTIMIZER, "optimizer": _ADAMW},
        strategies=STRATEGIES[1:],
        worlds=(1, 4),
    ),
    Feature("offload_params", "only the parameters in host memory", {"offload": _PARAMS}, strategies=("full_shard",)),
    Feature(
        "offload_hybrid",
        "both, with hybrid sharding in groups of 2 ranks",
        {"offload": _BOTH, **_GROUPS},
        strategies=("hybrid_shard",),
        worlds=(4,),
    ),
    Feature(
        "offload_optimizer_hybrid",
        "the optimizer, with hybrid sharding in groups of 2 ranks",
        {"offload": _OPTIMIZER, **_GROUPS},
        strategies=("hybrid_shard", "hybrid_shard_grad_op"),
        worlds=(4,),
    ),
)


# Other precisions than fp32 and bf16 with fp32 master weights: fp16, models loaded in bf16, and training without
# master weights.


def _in_bf16(name: str) -> nn.Module:
    """A model as loaded from a bf16 checkpoint: bf16 parameters, fp32 buffers."""
    model = MODELS[name].build()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


_LOADED = {name: TestModel(partial(_in_bf16, name), model.sample) for name, model in MODELS.items()}

PRECISION = (
    Feature(
        "fp16",
        "fp16 with a dynamic loss scale that starts too high and grows soon, so that steps are skipped",
        {"precision": {"initial_loss_scale": 2.0**21, "loss_scale_growth_interval": 5}},
        models=MODELS,
        precisions=("fp16",),
        steps_in_suite=20,
    ),
    Feature(
        "fp16_static_scale",
        "fp16 with a constant loss scale",
        {"precision": {"loss_scale": 128}},
        precisions=("fp16",),
        accumulation=1,
    ),
    Feature("bf16_loaded", "a model loaded in bf16, trained with fp32 master weights", models=_LOADED),
    # One micro-batch per window, since each engine has its own order of summing bf16 gradients over ranks and
    # micro-batches. AdamW, whose fused kernel rounds once; torch's SGD on the CPU rounds the last elements of a tensor
    # differently.
    Feature(
        "pure_bf16",
        "weights and optimizer state in bf16, no master weights",
        {"precision": {"master": "bf16"}, "optimizer": _ADAMW},
        models=MODELS,
        precisions=("bf16",),
        accumulation=1,
    ),
)


# -- Activation checkpointing and compilation, which change only the cost of a step ----------------

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


# -- Validation during training: forwards in evaluation mode and loops of different length, which must not affect --
# training.


def _evaluating_loop(engine: unishard.Engine, data: list[dict[str, Any]], cell: Cell) -> Curve:
    rank = unishard.Topology.from_environment().rank
    recorder = Recorder()
    for turn, batch in enumerate(engine.batches(data)):
        loss = engine(**batch).loss
        engine.eval()
        with engine.lockstep():
            for _ in range((turn + rank) % 3):
                engine(**batch)
        engine.train().backward(loss)
        recorder.record(engine.mean(loss), engine.step())
        engine.eval()(**batch)
        engine.train()
    return recorder.curve()


EVALUATION = (
    Feature(
        "evaluation",
        "between forward and backward the ranks evaluate different numbers of batches in `engine.lockstep()`, and one "
        "more after each step",
        loop=_evaluating_loop,
    ),
)
