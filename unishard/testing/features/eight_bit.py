"""AdamW with moments of 8 bits, in blocks of 256 elements, wherever an engine may hold shards that begin inside one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import unishard
from unishard.config import Config
from unishard.contract.tolerances import TOLERANCES, Tolerance
from unishard.testing import oracle
from unishard.testing.cells import STRATEGIES, Cell, Feature
from unishard.testing.features import lora
from unishard.testing.features.sharding import GROUPS
from unishard.testing.models import MODELS, Mlp, MlpOutput, TestModel, llama
from unishard.testing.oracle import Curve

_EIGHT = {"optimizer": {"name": "adamw_8bit", "lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}}
_WHY = (
    "ranks that share a block of 256 elements have a scale each; elsewhere a difference of 1e-7 flips a code of 8 bits"
)
BOUNDS = {
    "fp32": Tolerance(1e-5, 3e-4, 1e-6, 5e-4, _WHY),
    "bf16": replace(TOLERANCES["bf16"], first_losses=3e-4, why=_WHY),
    "fp16": replace(TOLERANCES["fp16"], first_losses=1e-4, why=_WHY),
}


def wide() -> nn.Module:
    """With weights of odd sizes that are large enough for 8 bits, beside smaller ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return Mlp(hidden=53, inner=97)


class _WideTowers(nn.Module):
    """Runs its second tower only if the batch asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.always = Mlp(hidden=53, inner=97, blocks=1)
        self.sometimes = nn.ModuleList((nn.Linear(13, 331), nn.Linear(331, 13)))

    def forward(self, x: Tensor, labels: Tensor, use: Tensor) -> MlpOutput:
        if use.any():
            x = x + self.sometimes[1](functional.gelu(self.sometimes[0](x)))
        output: MlpOutput = self.always(x, labels)
        return output


def _wide_towers() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return _WideTowers()


def _own(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW

    first, *others = parameters
    groups: list[dict[str, Any]] = [{"params": [first], "lr": 1e-3}, {"params": others, "betas": (0.8, 0.95)}]
    made: torch.optim.Optimizer = AdamW(groups, lr=3e-3, optim_bits=8, min_8bit_size=1024)
    return made


def _with_object(model: nn.Module, cfg: Config) -> unishard.Engine:
    return unishard.prepare(model, cfg, _own(model.parameters()))


def _object(model: nn.Module, data: list[list[dict[str, Any]]], cfg: Config, cell: Cell) -> Curve:
    return oracle.train(model, data, cfg, world=cell.world, optimizer=_own)


_LLAMA: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 101}
_LORA, _UNFREEZING, _UNUSED = (
    next(each for each in lora.FEATURES if each.name == name) for name in ("lora", "unfreezing", "unused")
)
_WIDE = {"mlp": TestModel(wide, MODELS["mlp"].sample)}

FEATURES = (
    Feature("adamw_8bit", "AdamW with moments of 8 bits", _EIGHT, models=_WIDE, tolerances=BOUNDS),
    Feature(
        "adamw_8bit_object",
        "a bitsandbytes `AdamW` object with `optim_bits=8` and two groups",
        {"optimizer": None},
        models=_WIDE,
        strategies=("no_shard", "shard_grad_op", "full_shard"),
        precisions=("fp32",),
        prepare=_with_object,
        reference=_object,
        tolerances=BOUNDS,
        only_at_worlds=True,
    ),
    Feature(
        "adamw_8bit_tied",
        "AdamW with moments of 8 bits on a Llama whose head is tied to its embedding",
        _EIGHT,
        models={"llama": TestModel(partial(llama, tie_word_embeddings=True, **_LLAMA), MODELS["llama"].sample)},
        strategies=("shard_grad_op", "full_shard"),
        precisions=("fp32",),
        tolerances=BOUNDS,
        only_at_worlds=True,
    ),
    replace(
        _LORA,
        name="adamw_8bit_lora",
        about="AdamW with moments of 8 bits on adapters of a frozen base",
        sections=_EIGHT,
        models={"llama": TestModel(partial(lora.lora, rank=43, **_LLAMA), MODELS["llama"].sample)},
        strategies=("shard_optimizer", "full_shard"),
        tolerances=BOUNDS,
        only_at_worlds=True,
    ),
    replace(
        _UNFREEZING,
        name="adamw_8bit_unfreezing",
        about="AdamW with moments of 8 bits, while parameters are frozen and unfrozen",
        sections=_EIGHT,
        models={"mlp": TestModel(wide, MODELS["mlp"].sample)},
        precisions=("fp32",),
        tolerances=BOUNDS,
        only_at_worlds=True,
    ),
    replace(
        _UNUSED,
        name="adamw_8bit_unused",
        about="AdamW with moments of 8 bits, with a tower that most steps do not use",
        sections=_EIGHT,
        models={"mlp": TestModel(_wide_towers, lora.used_in_turns)},
        precisions=("fp32",),
        tolerances=BOUNDS,
        only_at_worlds=True,
    ),
    Feature(
        "adamw_8bit_hybrid",
        "AdamW with moments of 8 bits and hybrid sharding in groups of 2 ranks",
        _EIGHT | GROUPS,
        models=_WIDE,
        strategies=("hybrid_shard", "hybrid_shard_grad_op"),
        precisions=("fp32",),
        worlds=(4,),
        tolerances=BOUNDS,
    ),
    Feature(
        "adamw_8bit_offload",
        "AdamW with moments of 8 bits in host memory",
        _EIGHT | {"offload": {"optimizer": "cpu"}},
        models=_WIDE,
        strategies=STRATEGIES[1:],
        precisions=("fp32",),
        tolerances=BOUNDS,
        only_at_worlds=True,
    ),
    Feature(
        "adamw_8bit_fp16",
        "AdamW with moments of 8 bits in fp16 with a dynamic loss scale that skips updates",
        _EIGHT | {"precision": {"initial_loss_scale": 2.0**21, "loss_scale_growth_interval": 5}},
        models=_WIDE,
        strategies=("shard_optimizer", "full_shard"),
        precisions=("fp16",),
        steps_in_suite=14,
        tolerances=BOUNDS,
        only_at_worlds=True,
    ),
)
