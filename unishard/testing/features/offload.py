"""Parameters and optimizer in host memory; files of `nvme` need a library that a machine may not have."""

from __future__ import annotations

from unishard.testing.cells import STRATEGIES, Feature

__all__ = ["FEATURES"]

_ADAMW = {"name": "adamw", "lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}
_PARAMS, _OPTIMIZER = {"params": "cpu"}, {"optimizer": "cpu"}
_GROUPS = {"sharding": {"group_size": 2}}

FEATURES = (
    Feature("offload", {"offload": "cpu"}, strategies=("full_shard",), worlds=(1, 2, 4)),
    Feature("offload_adamw", {"offload": "cpu", "optimizer": _ADAMW}, strategies=("full_shard",)),
    Feature("offload_optimizer", {"offload": _OPTIMIZER}, strategies=STRATEGIES[1:]),
    Feature("offload_optimizer_adamw", {"offload": _OPTIMIZER, "optimizer": _ADAMW}, strategies=STRATEGIES[1:], worlds=(1, 4)),
    Feature("offload_params", {"offload": _PARAMS}, strategies=("full_shard",), refused={"fsdp": ("full_shard",)}),
    Feature("offload_hybrid", {"offload": "cpu"} | _GROUPS, strategies=("hybrid_shard",), worlds=(4,)),
    Feature(
        "offload_optimizer_hybrid", {"offload": _OPTIMIZER} | _GROUPS, strategies=("hybrid_shard", "hybrid_shard_grad_op"), worlds=(4,)
    ),
)
