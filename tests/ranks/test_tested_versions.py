"""A run with versions that were not tested says so once, and runs."""

from __future__ import annotations

import logging

import pytest
import torch

import unishard
from unishard.contract import tested_versions
from unishard.testing import run_ranks


def warned_of_versions(backend):
    """What rank by rank is logged when two models are prepared with a torch that nobody tested."""
    heard: list[str] = []
    listening = logging.Handler()
    listening.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("unishard").addHandler(listening)
    tested_versions.version_of = lambda package: "9.9" if package == "torch" else "0.19.8"
    cfg = unishard.Config.model_validate({"backend": backend, "sharding": "full_shard"})
    for _ in range(2):
        with unishard.prepare(torch.nn.Linear(4, 4), cfg):
            pass
    return heard


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
def test_a_torch_that_was_not_tested_is_one_warning_of_rank_0_and_no_refusal(backend):
    first, second = run_ranks(2, warned_of_versions, backend)
    assert [line.partition(" (")[0] for line in first] == [f"torch 9.9 was not tested with backend {backend}"]
    assert second == []
