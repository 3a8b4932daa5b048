"""Muon, whose update needs whole matrices, wherever an engine may hold only shards of them."""

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
from unishard.testing.models import MODELS, MlpOutput, TestModel, llama
from unishard.testing.oracle import Curve

_MUON = {
    "name": "muon",
    "lr": 0.01,
    "adamw_lr": 3e-3,
    "betas": [0.9, 0.95],
    "weight_decay": 0.1,
    "no_decay": ["norm"],
    "ns_dtype": "fp32",
}
_ROUNDED = Tolerance(
    1e-4, 1e-3, 1e-5, 1e-2, "an fp32 difference of 1e-7 flips a rounding of an iteration in bf16, by 2^-8 of an element"
)
_BF16 = replace(TOLERANCES["bf16"], first_losses=1e-4)
"""The iterations amplify the small singular values of a matrix, and with them differences of 1e-7, about 300 times."""
_BOUNDS = TOLERANCES | {"bf16": _BF16}


class Experts(nn.Module):
    """A residual block of fused experts: each weight has three dimensions, the first of which is the expert."""

    def __init__(self, width: int, experts: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, inner) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, inner, width) * inner**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, width)` to the same."""
        normed = self.norm(x)
        inside = functional.gelu(torch.einsum("bw,ewi->bei", normed, self.up))
        change = torch.einsum("bei,eiw,be->bw", inside, self.down, self.router(normed).softmax(-1))
        return x + change


class _FusedMixture(nn.Module):
    """Two blocks of fused experts, of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(13, 11)
        self.blocks = nn.ModuleList(Experts(11, 3, 7) for _ in range(2))
        self.head = nn.Linear(11, 11)

    def forward(self, x: Tensor, labels: Tensor) -> MlpOutput:
        hidden = self.inp(x)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        return MlpOutput(functional.cross_entropy(logits.float(), labels), logits)


def _fused() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return _FusedMixture()


class _Bare(nn.Module):
    """Nothing but matrices, as torch's own Muon needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(*sizes, bias=False) for sizes in ((13, 23), (23, 17), (17, 11)))

    def forward(self, x: Tensor, labels: Tensor) -> MlpOutput:
        for block in self.blocks[:2]:
            x = functional.gelu(block(x))
        logits = self.blocks[2](x)
        return MlpOutput(functional.cross_entropy(logits.float(), labels), logits)


def _bare() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return _Bare()


def _own(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    first, *others = parameters
    groups: list[dict[str, Any]] = [{"params": [first], "lr": 1e-2}, {"params": others, "momentum": 0.9}]
    return torch.optim.Muon(groups, lr=5e-3, adjust_lr_fn="match_rms_adamw")


def _with_object(model: nn.Module, cfg: Config) -> unishard.Engine:
    return unishard.prepare(model, cfg, _own(model.parameters()))


def _object(model: nn.Module, data: list[list[dict[str, Any]]], cfg: Config, cell: Cell) -> Curve:
    return oracle.train(model, data, cfg, world=cell.world, optimizer=_own)


_MUON_ON = {"optimizer": _MUON}
_LORA, _UNFREEZING, _UNUSED = (
    next(each for each in lora.FEATURES if each.name == name) for name in ("lora", "unfreezing", "unused")
)

MATRICES = (
    Feature(
        "muon",
        "Muon with iterations in fp32 on the matrices of the blocks, AdamW on the rest at another rate",
        {"optimizer": _MUON | {"lr": 0.02}},
        models={"llama": MODELS["llama"]},
        tolerances=_BOUNDS,
    ),
    Feature(
        "muon_object",
        "a `torch.optim.Muon` object of two groups, created before sharding",
        {"optimizer": None},
        models={"matrices": TestModel(_bare, MODELS["mlp"].sample)},
        strategies=("no_shard", "shard_grad_op", "full_shard"),
        precisions=("fp32",),
        prepare=_with_object,
        reference=_object,
        tolerances={"fp32": _ROUNDED},
        only_at_worlds=True,
    ),
    Feature(
        "muon_experts",
        "Muon on fused experts, a matrix each",
        _MUON_ON,
        models={"experts": TestModel(_fused, MODELS["mlp"].sample)},
        precisions=("fp32",),
        only_at_worlds=True,
    ),
    Feature(
        "muon_tied",
        "Muon on a Llama whose head is tied to its embedding",
        _MUON_ON,
        models={"llama": TestModel(partial(llama, tie_word_embeddings=True), MODELS["llama"].sample)},
        strategies=("shard_grad_op", "full_shard"),
        precisions=("fp32",),
        only_at_worlds=True,
    ),
    replace(
        _LORA,
        name="muon_lora",
        strategies=("shard_optimizer", "full_shard"),
        about="Muon on adapters of a frozen base",
        sections={"optimizer": {key: value for key, value in _MUON.items() if key != "no_decay"}},
        only_at_worlds=True,
    ),
    replace(
        _UNFREEZING,
        name="muon_unfreezing",
        about="Muon, while parameters are frozen and unfrozen",
        sections=_MUON_ON,
        precisions=("fp32",),
        only_at_worlds=True,
    ),
    replace(
        _UNUSED,
        name="muon_unused",
        about="Muon on matrices named by patterns, with a tower that most steps do not use",
        sections={"optimizer": _MUON | {"matrices": [r"(up|down)\.weight", r"sometimes\.\d\.weight"]}},
        precisions=("fp32",),
        only_at_worlds=True,
    ),
    Feature(
        "muon_hybrid",
        "Muon with hybrid sharding in groups of 2 ranks",
        _MUON_ON | GROUPS,
        strategies=("hybrid_shard", "hybrid_shard_grad_op"),
        precisions=("fp32",),
        worlds=(4,),
    ),
    Feature(
        "muon_offload",
        "Muon with the optimizer in host memory",
        _MUON_ON | {"offload": {"optimizer": "cpu"}},
        strategies=STRATEGIES[1:],
        precisions=("fp32",),
        only_at_worlds=True,
    ),
    Feature(
        "muon_fp16",
        "Muon in fp16 with a dynamic loss scale that skips updates",
        _MUON_ON | {"precision": {"initial_loss_scale": 2.0**21, "loss_scale_growth_interval": 5}},
        strategies=("shard_optimizer", "full_shard"),
        precisions=("fp16",),
        steps_in_suite=14,
        tolerances=TOLERANCES | {"fp16": replace(TOLERANCES["fp16"], first_losses=1e-4)},
        only_at_worlds=True,
    ),
)
