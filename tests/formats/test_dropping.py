"""Keys that are dropped, refusals that an override lifts, and what is proposed after a refusal."""

from __future__ import annotations

import json

import pytest

from unishard.contract.rules import Fit
from unishard.errors import ConfigError
from unishard.formats import translate
from unishard.formats.advice.remedies import remedy
from unishard.formats.files.source import open_source

ONE_BIT = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 7, "cuda_aware": False}},
    "zero_optimization": {"stage": 2, "stage3_foo": 1, "stage3_bar": 2},
}


def refused(outcome):
    return [item.key for item in outcome.of(Fit.UNSUPPORTED)]


def test_a_dropped_key_means_what_the_file_means_without_it():
    outcome = translate(ONE_BIT, "unishard", from_="deepspeed", drop=["optimizer", "zero_optimization.stage3_*"])
    without = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
    assert outcome.text == translate(without, "unishard", from_="deepspeed").text
    assert [one.key for one in outcome.dropped] == [
        "optimizer.type",
        "optimizer.params.lr",
        "optimizer.params.freeze_step",
        "optimizer.params.cuda_aware",
        "zero_optimization.stage3_foo",
        "zero_optimization.stage3_bar",
    ]


def test_a_block_that_is_emptied_goes_too():
    document = {"zero_optimization": {"stage": 1}, "fp16": {"strange": 1}}
    assert "fp16.strange" in refused(translate(document, "deepspeed", from_="deepspeed"))
    outcome = translate(document, "deepspeed", from_="deepspeed", drop=["fp16.strange"])
    assert outcome.text == translate({"zero_optimization": {"stage": 1}}, "deepspeed", from_="deepspeed").text


def test_keys_of_a_file_that_the_document_names(tmp_path):
    (tmp_path / "ds.json").write_text(
        json.dumps({"zero_optimization": {"stage": 2}, "data_efficiency": {"enabled": True}})
    )
    path = tmp_path / "a.yaml"
    path.write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n"
    )
    key = "deepspeed_config.deepspeed_config_file.data_efficiency"
    assert refused(translate(path, "unishard")) == [key]
    outcome = translate(path, "unishard", drop=[key])
    assert (refused(outcome), outcome.reading.config.sharding.strategy) == ([], "shard_grad_op")
    assert [one.key for one in outcome.dropped] == [key]


def test_dropping_the_name_of_a_file_drops_what_is_in_it(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("per_device_train_batch_size: 1\nlearning_rate: 1e-4\ndeepspeed: no_such_file.json\n")
    outcome = translate(path, "unishard", from_="hf", drop=["deepspeed"])
    assert not [entry.key for entry in outcome.reading.entries if entry.path[0] == "deepspeed" and entry.effect.fields]


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"--drop zero\.stage: matches no key"):
        translate(ONE_BIT, "unishard", from_="deepspeed", drop=["zero.stage"])


def test_a_key_that_counts_for_the_format_may_be_dropped(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1}')
    assert translate(path, "unishard", drop=["zero_optimization", "train_*"]).reading.format == "deepspeed"


@pytest.mark.parametrize("to", ["unishard", "deepspeed", "accelerate", "hf"])
def test_an_override_lifts_the_refusal_of_the_key_that_decides_the_field(to):
    overrides = ["optimizer.name=adamw"]
    outcome = translate(ONE_BIT, to, from_="deepspeed", overrides=overrides, drop=["*.stage3_*"])
    assert refused(outcome) == []
    item = next(item for item in outcome.items if item.key == "optimizer.type")
    assert item.fit in (Fit.IGNORED, Fit.NEEDS_INPUT)
    assert "--set optimizer.name=adamw decides instead" in item.note or item.fit is Fit.NEEDS_INPUT


def test_the_arguments_of_a_class_that_is_replaced_go_with_it():
    outcome = translate(
        ONE_BIT, "deepspeed", from_="deepspeed", overrides=["optimizer.name=adamw"], drop=["*.stage3_*"]
    )
    assert outcome.document["optimizer"]["type"] == "AdamW"
    assert not {"freeze_step", "cuda_aware"} & outcome.document["optimizer"]["params"].keys()
    assert outcome.document["optimizer"]["params"]["lr"] == 1e-3


CASES = {
    "an optimizer that was removed": ("deepspeed", ONE_BIT),
    "an optimizer that needs whole tensors": (
        "deepspeed",
        {"optimizer": {"type": "Lamb", "params": {"lr": 1}}, "fp16": {"enabled": True}},
    ),
    "a feature of neither engine": (
        "deepspeed",
        {"zero_optimization": {"stage": 1}, "data_efficiency": {"enabled": True, "seed": 1}},
    ),
    "parallelism": (
        "deepspeed",
        {
            "zero_optimization": {"stage": 1},
            "tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": []}},
        },
    ),
    "files": (
        "deepspeed",
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/disk"}}},
    ),
    "a type that is missing": (
        "accelerate",
        {"num_processes": 2, "fsdp_config": {"fsdp_version": 2}, "mixed_precision": "bf16"},
    ),
    "another launcher": (
        "accelerate",
        {
            "compute_environment": "SLURM",
            "distributed_type": "MEGATRON_LM",
            "megatron_lm_tp_size": 2,
            "num_processes": 2,
        },
    ),
    "a block that is text": (
        "accelerate",
        {"distributed_type": "DEEPSPEED", "deepspeed_config": "ds.json", "num_processes": 2},
    ),
}


@pytest.mark.parametrize(("tool", "document"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("only_drop", [False, True])
def test_what_is_proposed_works(tool, document, only_drop):
    broken = 0
    for to, overrides in (
        ("unishard", ["backend=fsdp"]),
        ("unishard", ["backend=deepspeed"]),
        ("accelerate", []),
        ("hf", []),
    ):
        source = open_source(document)
        if translate(source, to, from_=tool, overrides=overrides).status(strict=False) != 1:
            continue
        broken += 1
        found = remedy(source, to, from_=tool, overrides=overrides, only_drop=only_drop)
        assert found is not None
        assert not only_drop or found.overrides == tuple(overrides)
        again = translate(source, to, from_=tool, overrides=found.overrides, drop=found.drop)
        assert (again.status(strict=False), again.text) == (0, found.text)
    assert broken


def test_nothing_is_proposed_where_an_override_is_refused():
    document = {
        "distributed_type": "FSDP",
        "num_processes": 2,
        "mixed_precision": "no",
        "fsdp_config": {"fsdp_version": 2},
    }
    overrides = ["offload.params=nvme", "offload.nvme_path=/disk"]
    assert remedy(open_source(document), "accelerate", from_="accelerate", overrides=overrides) is None
