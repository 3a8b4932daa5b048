"""Parameters that every rank holds whole although the strategy shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from unishard.testing.cells import Feature
from unishard.testing.features.conditional import CONDITIONAL_MODELS
from unishard.testing.features.sharding import GROUPS
from unishard.testing.models import MODELS, Block, MlpOutput, TestModel

_SHARDED = ("shard_optimizer", "shard_grad_op", "full_shard")
_NORMS = {"sharding": {"replicate": ["norm", "head"]}}


class Readers(nn.Module):
    """Blocks, before, between and after which the root reads the weight of a module whose own forward runs last."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(13, 13, bias=False)
        self.blocks = nn.ModuleList(Block(13, 17) for _ in range(2))
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(13, 11)

    def forward(self, x: Tensor, labels: Tensor, **unused: Any) -> MlpOutput:
        """Loss of a batch: `x` is `(batch, 13)`, `labels` `(batch,)`."""
        for block in self.blocks:
            x = block(functional.linear(x, self.table.weight.softmax(-1)))
        logits = self.head(self.table(x)) / self.temperature
        return MlpOutput(functional.cross_entropy(logits.float(), labels), logits)


def _readers() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return Readers()


FEATURES = (
    Feature("replicated", "norms and the head whole on every rank", _NORMS, models=MODELS),
    Feature(
        "replicated_skipped",
        "experts that ranks skip, whole on every rank",
        {"sharding": {"replicate": [r"experts\."]}},
        models={"mixture": CONDITIONAL_MODELS["mixture"]},
        strategies=_SHARDED,
    ),
    Feature(
        "replicated_tower",
        "a tower that ranks skip, whole on every rank",
        {"sharding": {"replicate": ["tower"]}},
        models={"pictures": CONDITIONAL_MODELS["pictures"]},
        strategies=_SHARDED,
    ),
    Feature(
        "replicated_read",
        "a weight that is read outside the forward of its module, and a number, whole on every rank",
        {"sharding": {"replicate": ["table", "temperature"]}},
        models={"readers": TestModel(_readers, MODELS["mlp"].sample)},
        strategies=_SHARDED,
    ),
    Feature(
        "replicated_hybrid",
        "norms and the head whole on every rank, with hybrid sharding in groups of 2 ranks",
        {"sharding": GROUPS["sharding"] | _NORMS["sharding"]},
        models={"llama": MODELS["llama"]},
        strategies=("hybrid_shard", "hybrid_shard_grad_op"),
        worlds=(4,),
    ),
)
