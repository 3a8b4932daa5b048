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


def test_what_a_file_leaves_out_jobconfig_fills_in():
    reading = read({"parallelism": {"data_parallel_shard_degree": 4}}, "torchtitan")
    cfg = reading.config
    assert reading.topology.world_size == 4
    assert (cfg.optimizer.lr, cfg.training.micro_batch_size, cfg.training.gradient_clipping) == (8e-4, 8, 1.0)
    assert (cfg.precision.compute, cfg.activation_checkpointing) == ("bf16", "selective")
    assert (cfg.scheduler.name, cfg.scheduler.total_steps, cfg.scheduler.warmup_steps) == ("linear", 10000, 200)


@pytest.mark.parametrize(
    ("degrees", "strategy", "group"),
    [
        ({"shard": -1, "replicate": 1}, "full_shard", None),
        ({"shard": 8, "replicate": 1}, "full_shard", None),
        ({"shard": 1, "replicate": 8}, "no_shard", None),
        ({"shard": 4, "replicate": 2}, "hybrid_shard", 4),
        ({"shard": -1, "replicate": 4}, "hybrid_shard", 2),
    ],
)
def test_degrees_decide_the_strategy(degrees, strategy, group):
    said = {f"data_parallel_{axis}_degree": size for axis, size in degrees.items()}
    cfg = config({**DOCUMENT, "parallelism": said})
    assert (cfg.sharding.strategy, cfg.sharding.group_size) == (strategy, group)


@pytest.mark.parametrize(("word", "reshards"), [("default", True), ("always", True), ("never", False)])
def test_resharding(word, reshards):
    assert config(changed("parallelism.fsdp_reshard_after_forward", word)).sharding.reshard_after_forward is reshards


def test_offload_and_formats():
    cfg = config(changed("training.enable_cpu_offload", True))
    assert (cfg.offload.params, cfg.offload.optimizer) == ("cpu", "cpu")
    assert config(changed("training.mixed_precision_param", "float32")).precision.compute == "fp32"
    assert config(changed("training.dtype", "bfloat16")).precision.master == "bf16"
    assert config(changed("training.max_norm", math.inf)).training.gradient_clipping is None


def test_warm_ups_begin_one_update_earlier():
    item = items(changed("lr_scheduler.warmup_steps", 100))["lr_scheduler.warmup_steps"]
    assert item.fit is Fit.APPROXIMATE
    assert "(i + 1)" in item.note
    constant = merge(
        changed("lr_scheduler.warmup_steps", 100), {"lr_scheduler": {"decay_ratio": 0.0, "min_lr_factor": 0.0}}
    )
    cfg = config(constant)
    assert (cfg.scheduler.name, cfg.scheduler.warmup_steps, cfg.scheduler.warmup_start_ratio) == ("constant", 99, 0.01)
    assert items(constant)["lr_scheduler.warmup_steps"].fit is Fit.EXACT


def test_a_decay_as_long_as_the_rest_is_no_other_schedule():
    assert items(changed("lr_scheduler.decay_ratio", 1.0))["lr_scheduler.decay_ratio"].fit is Fit.IGNORED
    stable = items(changed("lr_scheduler.decay_ratio", 0.2))["lr_scheduler.decay_ratio"]
    assert stable.fit is Fit.UNSUPPORTED


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


@pytest.mark.parametrize(
    "key", ["optimizer.muon_lr", "training.z_loss", "parallelism.my_fork_degree", "model.tokenizer_kind"]
)
def test_a_key_of_a_fork_is_reported_and_not_refused(key):
    item = items(changed(key, 2))[key]
    assert (item.fit, "only a fork that adds it reads it" in item.note) == (Fit.APPROXIMATE, True)


@pytest.mark.parametrize(("mode", "option"), [("selective", "op"), ("selective", "2"), ("memory_budget", "op")])
def test_selective_checkpointing_keeps_other_results(mode, option):
    document = {**DOCUMENT, "activation_checkpoint": {"mode": mode, "selective_ac_option": option}}
    item = items(document)["activation_checkpoint.mode"]
    assert (item.fit, config(document).activation_checkpointing) == (Fit.EQUIVALENT, "selective")


def test_only_a_compiled_model_is_compiled():
    document = {**DOCUMENT, "compile": {"enable": True, "components": ["loss"]}}
    assert config(document).compile.mode == "none"
    assert items(document)["compile.enable"].fit is Fit.EQUIVALENT


def test_older_names():
    training = {"batch_size": 4, "compile": True, "seed": 3, "steps": 50}
    cfg = config({"training": training, "lr_scheduler": {"lr_min": 0.2, "warmup_steps": 0}, "parallelism": {}})
    assert (cfg.training.micro_batch_size, cfg.compile.mode, cfg.training.seed, cfg.scheduler.min_lr_ratio) == (
        4,
        "per_block",
        3,
        0.2,
    )


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
