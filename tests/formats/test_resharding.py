"""A number in `sharding.reshard_after_forward`: torch's `fully_shard` takes it, and DeepSpeed's hpZ; other tools only
true or false."""

from __future__ import annotations

from typing import Any

import pytest

from unishard.config.topology import Topology
from unishard.contract.rules import Fit
from unishard.formats.translating import Outcome, translate

NODES = Topology(world_size=8, local_world_size=4)


def written(to: str, **sections: Any) -> tuple[Outcome, Fit]:
    sharding = {"reshard_after_forward": 4, "units": ["Block"]}
    outcome = translate(
        {"scheduler": {"name": "constant"}, "sharding": sharding, **sections}, to, from_="unishard", topology=NODES
    )
    (found,) = [item for item in outcome.items if item.key == "sharding.reshard_after_forward"]
    return outcome, found.fit


@pytest.mark.parametrize(
    ("to", "keys", "value"),
    [
        ("hf", ("fsdp_config", "reshard_after_forward"), True),
        ("accelerate", ("fsdp_config", "fsdp_reshard_after_forward"), True),
    ],
)
def test_tools_that_take_only_true_or_false_gather_among_all_ranks(to: str, keys: tuple[str, ...], value: Any) -> None:
    outcome, fit = written(to)
    found = outcome.document
    for key in keys:
        found = found[key]
    assert found is value or found == value
    assert fit is Fit.EQUIVALENT


def test_deepspeed_itself_has_hpz() -> None:
    outcome, fit = written("deepspeed", backend="deepspeed")
    assert outcome.document["zero_optimization"]["zero_hpz_partition_size"] == 4
    assert fit is Fit.EXACT
    back = translate(outcome.document, "unishard", from_="deepspeed", topology=NODES).document["sharding"]
    assert back == {"strategy": "full_shard", "reshard_after_forward": 4, "units": ["Block"]}
