"""DeepSpeed's JSON, read and written: what each key means, and what survives there and back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unishard.config import Config, leaves, value_at
from unishard.config.nested import flat
from unishard.config.topology import Topology
from unishard.contract import registry
from unishard.contract.rules import Fit
from unishard.formats import catalog, translate
from unishard_deepspeed.keys import ROWS


def outcome(document, to="unishard", *overrides, topology=None):
    return translate(document, to, from_="deepspeed", overrides=overrides, topology=topology)


def config(document, *overrides, topology=None):
    found = outcome(document, "unishard", *overrides, topology=topology)
    assert not found.of(Fit.UNSUPPORTED), found.of(Fit.UNSUPPORTED)
    return found.reading.config


# -- ZeRO ------------------------------------------------------------------------------------------


def test_names_without_their_prefix_mean_the_same():
    short = {"stage": 3, "prefetch_bucket_size": 5e6, "max_reuse_distance": 0, "max_live_parameters": 0}
    long = {"stage": 3, **{f"stage3_{name}": value for name, value in short.items() if name != "stage"}}
    assert config({"zero_optimization": short}) == config({"zero_optimization": long})
    assert config({"zero_optimization": short}).communication.prefetch_bucket_size == 5_000_000


def test_a_setting_of_deepspeed_alone_is_kept_for_it():
    found = outcome({"zero_optimization": {"stage": 3, "sub_group_size": "1e8", "zero_quantized_weights": True}})
    assert found.reading.config.native == {
        "deepspeed": {"zero_optimization": {"sub_group_size": 10**8, "zero_quantized_weights": True}}
    }
    elsewhere = {i.key: i.fit for i in outcome(found.reading.source.data, "unishard", "backend=fsdp").items}
    assert elsewhere["zero_optimization.sub_group_size"] is Fit.IGNORED
    assert elsewhere["zero_optimization.zero_quantized_weights"] is Fit.APPROXIMATE


# -- precision -------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["hf", "accelerate", "deepspeed"])
def test_a_default_of_deepspeed_is_the_same_under_another_tool(to):
    document = {"fp16": {"enabled": True}, "zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1}
    document["gradient_accumulation_steps"] = 4
    found = outcome(document, to)
    assert found.status(strict=True) == 0
    ours = ("grad_accum_dtype", "hysteresis", "overlap_comm", "reduce_bucket_size", "memory_efficient_linear")
    assert not [key for key, _ in flat(found.document) if key.endswith(ours)]


def test_what_the_script_decides_stays_open_until_it_is_given():
    document = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    assert set(outcome(document).reading.undecided) == {"precision.compute", "precision.reduce"}
    precision = config(document, "precision.compute=bf16").precision
    assert (precision.compute, precision.reduce) == ("bf16", "bf16")


# -- what cannot be had ----------------------------------------------------------------------------


def test_every_key_that_native_settings_know_has_a_row():
    rows = registry.arguments("deepspeed").keys
    assert [
        key
        for key in ROWS
        if key not in rows and key.rpartition(".")[0] not in rows and key != "timers.throughput.enabled"
    ] == []


# -- laws ------------------------------------------------------------------------------------------

ratio = st.floats(0, 1)
rates = st.floats(1e-8, 1e2)


@st.composite
def expressible(draw):
    """Configs of every kind that DeepSpeed has words for, and some that it has not."""
    strategy = draw(st.sampled_from(("no_shard", "shard_optimizer", "shard_grad_op", "full_shard")))
    compute = draw(st.sampled_from(("fp32", "bf16", "fp16")))
    name = draw(st.sampled_from(("adamw", "adam", "sgd", "adagrad", "lion")))
    low = st.sampled_from(("fp32", compute))
    precision = {"compute": compute, "reduce": draw(low), "accumulate": draw(low)}
    if compute == "fp16":
        scales = {
            "loss_scale": "dynamic",
            "initial_loss_scale": 2.0 ** draw(st.integers(0, 30)),
            "loss_scale_growth_interval": 50,
        }
        precision |= draw(st.sampled_from((scales, {"loss_scale": 1024.0})))
    optimizer = {"name": name, "lr": draw(rates), "weight_decay": draw(ratio)}
    if name in ("adamw", "adam", "lion"):
        optimizer["betas"] = [draw(st.floats(0, 0.999)), 0.99]
    document = {
        "sharding": {"strategy": strategy},
        "precision": precision,
        "optimizer": optimizer,
        "scheduler": draw(schedules()),
        "training": {
            "micro_batch_size": draw(st.integers(1, 64)),
            "gradient_accumulation_steps": draw(st.integers(1, 64)),
            "gradient_clipping": draw(st.none() | rates),
            "nonfinite": draw(st.sampled_from(("skip", "raise") if compute == "fp16" else ("skip", "raise", "ignore"))),
        },
        "communication": {"reduce_bucket_size": draw(st.integers(1, 10**9)), "overlap": draw(st.booleans())},
    }
    if strategy != "no_shard":
        document["offload"] = {"optimizer": draw(st.sampled_from(("none", "cpu")))}
    if strategy == "full_shard":
        document["offload"]["params"] = draw(st.sampled_from(("none", "cpu")))
        document["sharding"] |= {
            "reshard_after_forward": draw(st.booleans()),
            "units": draw(st.sampled_from(("auto", ["Block"]))),
        }
        document["communication"]["prefetch_bucket_size"] = draw(st.integers(0, 10**9))
    return document


@st.composite
def schedules(draw):
    warmup = draw(st.integers(0, 100))
    schedule = {"name": draw(st.sampled_from(("constant", "linear", "cosine"))), "warmup_steps": warmup}
    if warmup > 1:
        schedule |= {"warmup_type": draw(st.sampled_from(("log", "linear"))), "delay_steps": draw(st.integers(0, 2))}
        schedule["warmup_start_ratio"] = draw(ratio)
    if schedule["name"] != "constant":
        schedule |= {"total_steps": warmup + draw(st.integers(1, 1000)), "min_lr_ratio": draw(ratio)}
    return schedule


def near(value):
    """A rate may come back as another product of the same numbers."""
    return pytest.approx(value, rel=1e-9) if isinstance(value, float) else value


@given(expressible())
def test_there_and_back_is_the_identity_on_what_is_exact(document):
    there = translate(document, "deepspeed", from_="unishard")
    words = catalog.get("deepspeed").write(there.reading, Topology()).fields
    back = outcome(json.loads(there.text)).reading.config
    for path, _ in leaves(Config):
        if words[path].fit is Fit.EXACT and path != "backend":
            assert value_at(back, path) == near(value_at(there.reading.config, path)), path
