"""Whatever reaches a format, by any road, is sharded alike."""

from __future__ import annotations

from typing import Any

from documents import SEEDS, documents
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unishard import ConfigError
from unishard.config.nested import flat
from unishard.config.topology import Topology
from unishard.contract.rules import Fit
from unishard.formats import Outcome, translate

RANKS = Topology(world_size=8, local_world_size=8)
TARGETS = ("accelerate", "hf")
SHARDED = {
    *(
        "version",
        "sharding_strategy",
        "reshard_after_forward",
        "auto_wrap_policy",
        "transformer_layer_cls_to_wrap",
        "min_num_params",
    ),
    *(
        "offload_params",
        "cpu_offload",
        "data_parallel_shard_degree",
        "data_parallel_replicate_degree",
        "distributed_type",
    ),
}


def sharded(outcome: Outcome) -> dict[str, Any]:
    """What a document says about sharding."""
    settings = ((key.rpartition(".")[2].removeprefix("fsdp_"), value) for key, value in flat(outcome.document))
    return {key: value for key, value in settings if key in SHARDED}


@settings(max_examples=16, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from([name for name in SEEDS if name != "unishard"]),
    target=st.sampled_from(TARGETS),
    data=st.data(),
)
def test_every_road_shards_alike(name: str, target: str, data: st.DataObject) -> None:
    document = data.draw(documents(name))
    try:
        middle = translate(document, "unishard", from_=name, overrides=["backend=fsdp"], topology=RANKS)
        direct = translate(document, target, from_=name, overrides=["backend=fsdp"], topology=RANKS)
        around = translate(middle.document, target, from_="unishard", topology=RANKS)
    except ConfigError:
        return
    if name != target and not (middle.of(Fit.UNSUPPORTED) or middle.of(Fit.NEEDS_INPUT)):
        assert sharded(direct) == sharded(around)


def test_fsdp_under_accelerate_gathers_block_by_block() -> None:
    zero = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    for target, block in (("accelerate", "fsdp_auto_wrap_policy"), ("hf", "auto_wrap_policy")):
        found = translate(zero, target, from_="deepspeed", overrides=["backend=fsdp"], topology=RANKS).document
        assert found["fsdp_config"][block] == "TRANSFORMER_BASED_WRAP"
