"""The table of FSDP's arguments against torch itself."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)

from unishard.contract import registry
from unishard.contract.rules import Fit

FSDP = registry.arguments("fsdp")


def effect(key, value):
    return next(entry.effect for entry in FSDP.read({"version": 1, key: value}) if entry.key == key)


@pytest.mark.parametrize("strategy", ShardingStrategy)
def test_torchs_strategies_have_these_names_and_numbers(strategy):
    by_name, by_number = effect("sharding_strategy", strategy.name), effect("sharding_strategy", strategy.value)
    assert by_name.fit is Fit.EXACT
    assert by_name.fields == by_number.fields
    assert effect("sharding_strategy", str(strategy)).fields == by_name.fields


@pytest.mark.parametrize(
    ("key", "words"), [("backward_prefetch", BackwardPrefetch), ("state_dict_type", StateDictType)]
)
def test_torchs_other_words_are_known(key, words):
    for word in words:
        assert effect(key, word.name).fit is Fit.IGNORED
        assert effect(key, word.value).fit is Fit.IGNORED


def test_the_formats_are_torchs():
    names = {key.removeprefix("mixed_precision.") for key in FSDP.keys if key.startswith("mixed_precision.")}
    known = {field.name for kind in (MixedPrecision, MixedPrecisionPolicy) for field in dataclasses.fields(kind)}
    assert names <= known


def test_the_arguments_are_torchs():
    constructor = inspect.signature(FullyShardedDataParallel).parameters
    for key in (
        "sharding_strategy",
        "cpu_offload",
        "auto_wrap_policy",
        "backward_prefetch",
        "forward_prefetch",
        "limit_all_gathers",
    ):
        assert key in constructor
        assert key in FSDP.keys
    for key in ("reshard_after_forward", "mesh"):
        assert key in inspect.signature(fully_shard).parameters
        assert key in FSDP.keys
