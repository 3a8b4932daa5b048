"""DeepSpeed's JSON, read and written: what each key means, and what survives there and back."""

from __future__ import annotations

import pytest

from unishard.config.nested import flat
from unishard.contract import registry
from unishard.contract.rules import Fit
from unishard.formats import catalog, translate
from unishard.formats.source import open_source
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


def test_it_is_recognised(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2}, // two\n "bf16": {"enabled": true},}')
    assert catalog.recognise(open_source(path)).name == "deepspeed"
    assert translate(path, "unishard").warnings
