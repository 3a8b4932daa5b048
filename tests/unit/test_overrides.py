from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import unishard
from unishard import ConfigError

EXAMPLE = "write them as overrides=['training.seed=3']"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("training.seed=3", "overrides must be a list, got a string; write overrides=['training.seed=3']"),
        (None, f"overrides must be a list, got None; {EXAMPLE}"),
        (3, f"overrides must be a list, got 3 (int); {EXAMPLE}"),
        ({"training.seed": 3}, f"overrides must be a list, got {{training.seed: 3}} (dict); {EXAMPLE}"),
        (["training.seed=3", 4], f"overrides contains 4 (int), which is not a string; {EXAMPLE}"),
    ],
    ids=str,
)
def test_what_is_no_list_of_changes(overrides: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        unishard.load({}, overrides)
    assert str(caught.value) == message


def test_values_are_yaml() -> None:
    cfg = unishard.load(
        {},
        [
            "training.micro_batch_size=4",
            "optimizer.lr=1e-4",
            "sharding.units=[A, B]",
            "strict=true",
            "training.gradient_clipping=null",
            "backend = deepspeed",
        ],
    )
    assert cfg.training.micro_batch_size == 4
    assert cfg.optimizer.lr == 1e-4
    assert cfg.sharding.units == ["A", "B"]
    assert cfg.strict is True
    assert cfg.training.gradient_clipping is None
    assert cfg.backend == "deepspeed"


def test_nested_over_a_shorthand() -> None:
    cfg = unishard.load({"sharding": "shard_grad_op", "offload": "cpu"}, ["sharding.units=[A]", "offload.params=none"])
    assert (cfg.sharding.strategy, cfg.sharding.units) == ("shard_grad_op", ["A"])
    assert (cfg.offload.params, cfg.offload.optimizer) == ("none", "cpu")


def test_a_shorthand_replaces_the_section() -> None:
    cfg = unishard.load({"sharding": {"strategy": "full_shard", "units": ["A"]}}, ["sharding=ddp"])
    assert (cfg.sharding.strategy, cfg.sharding.units) == ("no_shard", "auto")


def test_the_last_one_counts() -> None:
    assert unishard.load({"training": {"seed": 1}}, ["training.seed=2", "training.seed=3"]).training.seed == 3


def test_below_native_every_name_is_free() -> None:
    cfg = unishard.load({"native": {"deepspeed": {"a": 1}}}, ["native.deepspeed.zero_optimization.x=2"])
    assert cfg.native == {"deepspeed": {"a": 1, "zero_optimization": {"x": 2}}}


def test_mistakes_of_file_and_override_come_together(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("training: {seed: -1}\nscheduler: {name: linear, warmup_steps: 5}\n")
    with pytest.raises(ConfigError) as caught:
        unishard.load(path, ["scheduler.total_steps=5", "lr=1"])
    assert str(caught.value).splitlines() == [
        f"{path}:1: training.seed: must be a whole number of at least 0 and below 4294967296, got -1",
        f"{path}:2: scheduler.warmup_steps: must be smaller than total_steps (5), got 5",
        "override: lr: unknown field; did you mean 'optimizer.lr'?",
    ]


def test_an_override_mends_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("training: {seed: -1}\nscheduler: linear\n")
    cfg = unishard.load(path, ["training.seed=1", "scheduler.total_steps=5"])
    assert (cfg.training.seed, cfg.scheduler.total_steps) == (1, 5)


def test_an_override_below_a_broken_section_leaves_its_message(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("training: 3\n")
    with pytest.raises(ConfigError, match=r"c\.yaml:1: training: must be a section of fields"):
        unishard.load(path, ["training.seed=1"])
