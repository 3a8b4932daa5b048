"""Which ranks share a copy, and which numbers of ranks cannot be divided so."""

from __future__ import annotations

from typing import Any

import pytest

import unishard
from unishard import ConfigError, Topology
from unishard.config.shard_groups import check_groups, shard_group_size

NODES = Topology(world_size=8, local_world_size=4)


@pytest.mark.parametrize(
    ("sharding", "topology", "expected"),
    [
        ("no_shard", NODES, 1),
        ("shard_optimizer", NODES, 8),
        ("full_shard", NODES, 8),
        ("hybrid_shard", NODES, 4),
        ("hybrid_shard_grad_op", NODES, 4),
        ({"strategy": "hybrid_shard", "group_size": 2}, NODES, 2),
        ({"strategy": "hybrid_shard", "group_size": 8}, NODES, 8),
        ("hybrid_shard", Topology(), 1),
    ],
)
def test_ranks_that_share_a_copy(sharding: Any, topology: Topology, expected: int) -> None:
    cfg = unishard.load({"sharding": sharding})
    check_groups(cfg, topology)
    assert shard_group_size(cfg, topology) == expected


@pytest.mark.parametrize(
    ("sharding", "topology", "what"),
    [
        (
            {"strategy": "hybrid_shard", "group_size": 3},
            NODES,
            "is 3, which does not divide 8 ranks; write one of 2, 4, 8",
        ),
        (
            {"strategy": "hybrid_shard", "group_size": 16},
            NODES,
            "is 16, which does not divide 8 ranks; write one of 2, 4, 8",
        ),
        (
            {"strategy": "hybrid_shard", "group_size": 2},
            Topology(),
            "is 2, which does not divide 1 rank; choose full_shard",
        ),
        (
            "hybrid_shard",
            Topology(world_size=6, local_world_size=4),
            "is not set, and a node has 4 ranks, which does not divide 6 ranks; write one of 2, 3, 6",
        ),
        (
            "hybrid_shard_grad_op",
            Topology(world_size=2, local_world_size=1),
            "is not set, and a node has 1 rank, so nothing would be sharded; write 2 or more, or choose full_shard or "
            "no_shard",
        ),
    ],
)
@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
def test_groups_that_do_not_fit_the_ranks_are_refused(
    backend: str, sharding: Any, topology: Topology, what: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        unishard.translate(unishard.load({"backend": backend, "sharding": sharding}), topology=topology)
    assert str(caught.value) == f"sharding.group_size: {what}"


@pytest.mark.parametrize("sharding", [{}, {"strategy": "hybrid_shard", "group_size": 4}])
def test_a_group_after_forward_divides_the_ranks_that_share_a_copy(sharding: dict[str, Any]) -> None:
    check_groups(unishard.load({"sharding": {**sharding, "reshard_after_forward": 2}}), NODES)
    check_groups(
        unishard.load({"sharding": {**sharding, "reshard_after_forward": 2}}),
        Topology(world_size=4, local_world_size=4),
    )
    with pytest.raises(ConfigError, match=r"sharding\.reshard_after_forward: is 3, which does not divide the"):
        check_groups(unishard.load({"sharding": {**sharding, "reshard_after_forward": 3}}), NODES)


@pytest.mark.parametrize("size", [0, 1, -2])
def test_a_group_after_forward_has_two_ranks_at_least(size: int) -> None:
    with pytest.raises(ConfigError, match=f"is {size}; write a number of ranks from 2 on, or true or false"):
        unishard.load({"sharding": {"reshard_after_forward": size}})


@pytest.mark.parametrize(("size", "ranks", "instead"), [(4, 6, "write 2 or 3 or 6, or"), (2, 1, "start more ranks")])
def test_a_group_of_experts_divides_the_ranks(size, ranks, instead):
    with pytest.raises(ConfigError, match=rf"parallel\.expert\.size: is {size}, which does not divide.*{instead}"):
        check_groups(unishard.load({"parallel": {"expert": size}}), Topology(ranks))


@pytest.mark.parametrize(
    ("sharding", "what"),
    [
        (
            {"strategy": "hybrid_shard", "group_size": 2},
            "parallel.expert.size: is 4, which does not divide the 2 ranks that share one copy",
        ),
        (
            {"reshard_after_forward": 4},
            "sharding.reshard_after_forward: is 4, which does not divide the 2 ranks that have the same slices .*; write "
            "true or false",
        ),
    ],
)
def test_a_group_of_experts_is_inside_one_that_shares_a_copy(sharding, what):
    with pytest.raises(ConfigError, match=what):
        check_groups(unishard.load({"sharding": sharding, "parallel": {"expert": 4}}), NODES)
