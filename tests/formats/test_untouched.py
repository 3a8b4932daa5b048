"""The same tool in and out: nothing changes but what was asked for."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from accounting import WRITTEN
from documents import SEEDS, put

from unishard.config.nested import flat
from unishard.contract.rules import Fit
from unishard.formats import Outcome, translate

ZERO3 = {
    "fp16": {"enabled": True, "hysteresis": 2, "loss_scale": 0, "min_loss_scale": 1},
    "zero_optimization": {
        "stage": 3,
        "stage3_max_reuse_distance": 1e9,
        "stage3_max_live_parameters": 1e9,
        "reduce_bucket_size": 5e8,
    },
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 10,
}
"""A DeepSpeed config as people write it."""
WRAPPED: list[tuple[str, dict[str, Any]]] = [
    ("deepspeed", ZERO3),
    (
        "hf",
        {"output_dir": "out", "fp16": True, "per_device_train_batch_size": 4, "max_grad_norm": 1.0, "deepspeed": ZERO3},
    ),
    (
        "accelerate",
        {
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {"deepspeed_config_file": json.dumps(ZERO3)},
            "num_processes": 2,
        },
    ),
    (
        "accelerate",
        {
            "distributed_type": "FSDP",
            "fsdp_config": {
                "fsdp_version": 1,
                "fsdp_sharding_strategy": "FULL_SHARD",
                "fsdp_backward_prefetch": "BACKWARD_PRE",
            },
            "num_processes": 2,
        },
    ),
]


def again(document: Any, name: str, *overrides: str) -> Outcome:
    return translate(document, name, from_=name, overrides=overrides)


@pytest.mark.parametrize(
    ("name", "document"),
    [
        *WRAPPED,
        *((name, one) for name in WRITTEN if name != "unishard" for one in SEEDS.get(name, ())),
    ],
)
def test_nothing_is_asked_for(name: str, document: dict[str, Any]) -> None:
    outcome = again(document, name)
    refused = {item.key for item in outcome.of(Fit.UNSUPPORTED)}
    if not refused:
        assert outcome.document == document
        assert {item.fit for item in outcome.items if not item.assumed} <= {Fit.EXACT, Fit.EQUIVALENT, Fit.NEEDS_INPUT}
        assert not outcome.of(Fit.APPROXIMATE)


def test_a_file_that_does_not_change_keeps_every_character(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        '{  // a comment\n"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8},\n "train_batch_size": 8}'
    )
    assert translate(path, "deepspeed").text == path.read_text()


@pytest.mark.parametrize(
    ("name", "override", "key", "value"),
    [
        ("deepspeed", "training.gradient_clipping=0.5", "gradient_clipping", 0.5),
        ("deepspeed", "sharding.strategy=shard_grad_op", "zero_optimization.stage", 2),
        ("hf", "communication.reduce_bucket_size=1000", "deepspeed.zero_optimization.reduce_bucket_size", 1000),
    ],
)
def test_one_thing_is_asked_for(name: str, override: str, key: str, value: Any) -> None:
    document = next(one for other, one in WRAPPED if other == name)
    expected = copy.deepcopy(document)
    put(expected, tuple(key.split(".")), value)
    assert again(document, name, override).document == expected


def test_a_switch_takes_only_its_own_keys_along() -> None:
    before = dict(flat(ZERO3))
    after = dict(flat(again(ZERO3, "deepspeed", "precision.compute=bf16").document))
    differs = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert differs <= {"fp16.enabled", "bf16.enabled", "bf16.check_grad_overflow", "communication_data_type"}
    assert after["fp16.hysteresis"] == 2
