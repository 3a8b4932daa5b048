"""`training.buffers` and DistributedDataParallel's `broadcast_buffers`: what tools say of one comes back from the
other."""

from __future__ import annotations

from typing import Any

import pytest

from unishard.contract.rules import Fit
from unishard.formats import translate


def written(to: str, buffers: str | dict[str, str] | None, strategy: str = "no_shard", backend: str = "fsdp") -> Any:
    training = {} if buffers is None else {"buffers": buffers}
    config = {"backend": backend, "sharding": strategy, "training": training, "optimizer": {"name": "adamw"}}
    return translate(config, to, from_="unishard")


def fit(outcome: Any) -> tuple[Fit, str]:
    (found,) = [item for item in outcome.items if item.key == "training.buffers"]
    return found.fit, found.note


@pytest.mark.parametrize(("buffers", "sent"), [("rank0", True), ("local", False)])
def test_what_data_parallelism_does_is_written_and_read_back(buffers, sent):
    outcome = written("hf", buffers)
    assert fit(outcome)[0] is (Fit.EQUIVALENT if sent else Fit.EXACT)
    assert outcome.document["ddp_broadcast_buffers"] is sent
    assert translate(outcome.document, "unishard", from_="hf").reading.config.training.buffers == buffers


@pytest.mark.parametrize("to", ["hf", "accelerate", "deepspeed"])
def test_the_default_needs_no_key_and_says_for_whom_it_matters(to):
    outcome = written(to, "sync", "full_shard", "deepspeed" if to == "deepspeed" else "fsdp")
    found, note = fit(outcome)
    assert found is Fit.IGNORED
    assert "BatchNorm" in note
    assert "broadcast" not in str(outcome.document)


@pytest.mark.parametrize(
    ("to", "buffers", "strategy", "expected"),
    [
        ("hf", "rank0", "full_shard", Fit.NEEDS_INPUT),
        ("accelerate", "rank0", "full_shard", Fit.NEEDS_INPUT),
        ("accelerate", "local", "full_shard", Fit.EXACT),
        ("accelerate", "local", "no_shard", Fit.NEEDS_INPUT),
        ("accelerate", "rank0", "no_shard", Fit.EQUIVALENT),
    ],
)
def test_what_the_script_must_do_is_said(to, buffers, strategy, expected):
    assert fit(written(to, buffers, strategy))[0] is expected


@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
@pytest.mark.parametrize("to", ["hf", "accelerate"])
def test_merges_by_pattern_are_left_to_the_script(to, strategy):
    outcome = written(to, {"min_val": "min"}, strategy)
    assert fit(outcome) == (Fit.NEEDS_INPUT, "merge these buffers over the ranks before evaluation and saving")
    assert "broadcast" not in str(outcome.document)
