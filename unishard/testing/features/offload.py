"""Parameters and optimizer in host memory, or in files."""

from __future__ import annotations

from unishard.testing.cells import STRATEGIES, Feature
from unishard.testing.features.sharding import GROUPS

ADAMW = {"name": "adamw", "lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}
_PARAMS, _OPTIMIZER, _BOTH = {"params": "cpu"}, {"optimizer": "cpu"}, {"params": "cpu", "optimizer": "cpu"}
_STATE_IN_FILES = {"optimizer": "nvme", "nvme_path": "."}
_IN_FILES = {"params": "nvme", **_STATE_IN_FILES}

OFFLOAD = (
    Feature(
        "offload",
        "parameters and optimizer in host memory",
        {"offload": _BOTH},
        strategies=("full_shard",),
        worlds=(1, 2, 4),
    ),
    Feature("offload_adamw", "the same with AdamW", {"offload": _BOTH, "optimizer": ADAMW}, strategies=("full_shard",)),
    Feature("offload_optimizer", "the optimizer in host memory", {"offload": _OPTIMIZER}, strategies=STRATEGIES[1:]),
    Feature(
        "offload_optimizer_adamw",
        "the same with AdamW",
        {"offload": _OPTIMIZER, "optimizer": ADAMW},
        strategies=STRATEGIES[1:],
        worlds=(1, 4),
    ),
    Feature("offload_params", "only the parameters in host memory", {"offload": _PARAMS}, strategies=("full_shard",)),
    Feature(
        "offload_files",
        "parameters and optimizer in files, with AdamW",
        {"offload": _IN_FILES, "optimizer": ADAMW},
        strategies=("full_shard",),
        worlds=(1, 2, 4),
    ),
    Feature(
        "offload_optimizer_files",
        "the optimizer in files, with AdamW",
        {"offload": _STATE_IN_FILES, "optimizer": ADAMW},
        strategies=STRATEGIES[1:],
    ),
    Feature(
        "offload_hybrid",
        "both, with hybrid sharding in groups of 2 ranks",
        {"offload": _BOTH, **GROUPS},
        strategies=("hybrid_shard",),
        worlds=(4,),
    ),
    Feature(
        "offload_optimizer_hybrid",
        "the optimizer, with hybrid sharding in groups of 2 ranks",
        {"offload": _OPTIMIZER, **GROUPS},
        strategies=("hybrid_shard", "hybrid_shard_grad_op"),
        worlds=(4,),
    ),
)
