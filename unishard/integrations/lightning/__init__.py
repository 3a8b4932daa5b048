"""Strategies of Lightning that train with unishard: for `Trainer`, and for `Fabric`."""

from unishard.integrations.lightning.fabric import UnishardFabricStrategy
from unishard.integrations.lightning.saved import weights_of
from unishard.integrations.lightning.trainer import UnishardStrategy

__all__ = ["UnishardFabricStrategy", "UnishardStrategy", "weights_of"]
