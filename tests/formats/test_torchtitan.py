"""torchtitan's TOML: what each key says."""

from __future__ import annotations

import math
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unishard.config.nested import flat, merge, nested
from unishard.config.topology import Topology
from unishard.contract.rules import Fit
from unishard.formats import read, translate
from unishard.formats.catalog import recognise
from unishard.formats.source import open_source
from unishard.formats.torchtitan import FORMAT

EIGHT = Topology(world_size=8, local_world_size=8)
TRAINING = """
[job]
dump_folder = "./outputs"
description = "a run"

[model]
name = "llama3"
flavor = "8B"
converters = []

[optimizer]
name = "AdamW"
lr = 3e-4
eps = 1e-8

[lr_scheduler]
warmup_steps = 0
decay_type = "cosine"
min_lr_factor = 0.1

[training]
local_batch_size = 2
global_batch_size = 64
seq_len = 8192
max_norm = 0.5
steps = 1000
mixed_precision_param = "bfloat16"
mixed_precision_reduce = "float32"
enable_cpu_offload = false

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
fsdp_reshard_after_forward = "default"
tensor_parallel_degree = 1

[activation_checkpoint]
mode = "full"

[compile]
enable = true
components = ["model", "loss"]

[debug]
seed = 7

[checkpoint]
enable = true
initial_load_path = "assets/hf"
"""
DOCUMENT = tomllib.loads(TRAINING)


def changed(key, value):
    return merge(DOCUMENT, nested({key: value}))


def config(document, topology=EIGHT):
    return read(document, "torchtitan", topology=topology).config


def items(document, to="unishard", topology=EIGHT):
    return {item.key: item for item in translate(document, to, from_="torchtitan", topology=topology).items}


def test_a_whole_training_is_understood(tmp_path):
    file = tmp_path / "llama.toml"
    file.write_text(TRAINING)
    cfg = read(file, topology=EIGHT).config
    assert (cfg.backend, cfg.sharding.strategy, cfg.activation_checkpointing, cfg.compile.mode) == (
        "fsdp",
        "full_shard",
        "full",
        "per_block",
    )
    assert (cfg.precision.compute, cfg.precision.reduce, cfg.precision.master) == ("bf16", "fp32", "fp32")
    assert (cfg.training.micro_batch_size, cfg.training.gradient_accumulation_steps) == (2, 4)
    assert (cfg.training.gradient_clipping, cfg.training.seed) == (0.5, 7)
    assert (cfg.optimizer.name, cfg.optimizer.lr, cfg.optimizer.betas, cfg.optimizer.weight_decay) == (
        "adamw",
        3e-4,
        (0.9, 0.95),
        0.1,
    )
    assert (cfg.scheduler.name, cfg.scheduler.total_steps, cfg.scheduler.min_lr_ratio) == ("cosine", 1000, 0.1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("parallelism.tensor_parallel_degree", 2),
        ("parallelism.context_parallel_degree", 2),
        ("parallelism.pipeline_parallel_degree", 4),
        ("parallelism.expert_parallel_degree", 2),
        ("parallelism.data_parallel_shard_degree", 0),
        ("parallelism.data_parallel_shard_degree", "all"),
        ("parallelism.fsdp_reshard_after_forward", "sometimes"),
        ("parallelism.fsdp_reshard_after_forwar", "never"),
        ("lr_scheduler.decay_type", "sqrt"),
        ("model.converters", ["float8"]),
        ("optimizer.name", "Muon"),
        ("optimizer.early_step_in_backward", True),
        ("fault_tolerance.enable", True),
        ("training.max_norm", 0),
        ("training.global_batch_size", 63),
        ("training.mixed_precision_param", "float8"),
        ("training", 3),
    ],
)
def test_what_cannot_be_had_is_refused(key, value):
    item = items(changed(key, value))[key]
    assert item.fit is Fit.UNSUPPORTED
    assert item.note


def test_it_is_recognised():
    assert recognise(open_source(DOCUMENT)) is FORMAT


JUNK = st.sampled_from(
    [None, True, 0, -1, 2.5, 10**30, "", "auto", "text", [], [1, "a", {}], {}, {"a": {"b": 1}}, math.inf, math.nan]
)
PLACES = [tuple(key.split(".")) for key, _ in flat(DOCUMENT)] + [(key,) for key in DOCUMENT]


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(PLACES), JUNK, st.sampled_from(["unishard", "hf"]))
def test_whatever_stands_at_a_key_it_gets_its_verdict(place, junk, to):
    document = {**DOCUMENT, place[0]: {**DOCUMENT[place[0]], place[1]: junk} if place[1:] else junk}
    keys = [item.key for item in translate(document, to, from_="torchtitan", topology=EIGHT).items]
    for path, _ in flat(document):
        assert any(path == key or path.startswith(f"{key}.") for key in keys), path
