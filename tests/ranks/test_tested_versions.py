"""A run with versions that were not tested says so once, and runs."""

from __future__ import annotations

import pytest
import torch
from harness import heard, on_ranks

import unishard
from unishard.contract import tested_versions


def warned_of_versions(backend):
    """What rank by rank is logged when two models are prepared with a torch that nobody tested."""
    tested_versions.version_of = lambda package: "9.9" if package == "torch" else "0.19.8"
    cfg = unishard.Config.model_validate({"backend": backend, "sharding": "full_shard"})
    with heard() as lines:
        for _ in range(2):
            unishard.prepare(torch.nn.Linear(4, 4), cfg).close()
    return lines


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
def test_a_torch_that_was_not_tested_is_one_warning_of_rank_0_and_no_refusal(backend):
    first, second = on_ranks(warned_of_versions, backend)
    assert [line.partition(" (")[0] for line in first] == [f"torch 9.9 was not tested with backend {backend}"]
    assert second == []
