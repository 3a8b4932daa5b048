"""Where an optimizer of shards finds, inside a step, what it changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from unishard.contract.adapter import Updates
from unishard.distributed.shards import SteppedShard


def stepped_by_name(updates: Updates) -> Callable[[], Mapping[str, SteppedShard]]:
    """A function to call in a step: this rank's shard of each parameter that is stepped then, by name."""
    find = updates.stepped_memory()
    names = {parameter: name for name, parameter in updates.model.module.named_parameters()}
    return lambda: {names[parameter]: shard for parameter, shard in find().items()}
