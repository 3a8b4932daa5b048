"""What tools do where their file is silent, beside what it says, or under other names: said in the report, and nothing
refused for it."""

from __future__ import annotations

import io
from typing import Any

import pytest

from unishard.cli.report import ReportForm, write_report
from unishard.contract.rules import Fit
from unishard.formats import Item, Outcome, read, translate
from unishard.formats.source import open_source

ZERO_3 = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
}
ACCELERATE = {"compute_environment": "LOCAL_MACHINE", "num_processes": 4, "mixed_precision": "bf16"}
INLINE = {**ACCELERATE, "distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}}


def item(outcome: Outcome, end: str) -> Item:
    (found,) = [one for one in outcome.items if one.key.endswith(end)]
    return found


def report(outcome: Outcome) -> str:
    out = io.StringIO()
    write_report(outcome, ReportForm.TEXT, out)
    return out.getvalue()


# Clipping by default.


@pytest.mark.parametrize("to", ["unishard", "accelerate", "deepspeed", "hf"])
def test_clipping_that_deepspeed_applies_by_default_is_a_line_of_the_default_report(to: str) -> None:
    text = report(translate(ZERO_3, to))
    assert "gradient_clipping = 1.0" in text
    assert "DeepSpeed clips to 1.0 by default since 0.19.3; earlier versions did not clip" in " ".join(text.split())


def test_so_is_clipping_that_accelerate_applies_and_what_the_file_says_is_not_said_twice() -> None:
    assert "Accelerate 1.15.0 clips to 1.0 where the file has no gradient_clipping" in report(
        translate(INLINE, "unishard")
    )
    assert "clips to 1.0" not in report(translate({**ZERO_3, "gradient_clipping": 1.0}, "unishard"))


# FSDP1 in autocast.


@pytest.mark.parametrize(("version", "fit"), [(1, Fit.APPROXIMATE), (2, Fit.EXACT)])
def test_fsdp_1_with_mixed_precision_also_runs_in_autocast(version: int, fit: Fit) -> None:
    file = {**ACCELERATE, "distributed_type": "FSDP", "fsdp_config": {"fsdp_version": version}}
    assert item(translate(file, "unishard"), "mixed_precision").fit is fit
    arguments = {
        "per_device_train_batch_size": 1,
        "bf16": True,
        "fsdp": "full_shard",
        "fsdp_config": {"version": version},
    }
    assert item(translate(arguments, "unishard"), "bf16").fit is fit
    assert item(translate({**file, "mixed_precision": "no"}, "unishard"), "mixed_precision").fit is Fit.EXACT


# DeepSpeed's schedules and scale.


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        (
            "OneCycle",
            [
                "cycle_min_lr",
                "cycle_max_lr",
                "cycle_second_stair_count",
                "decay_mom_rate",
                "cycle_momentum",
                "decay_step_size",
            ],
        ),
        (
            "LRRangeTest",
            ["lr_range_test_min_lr", "lr_range_test_step_rate", "lr_range_test_step_size", "lr_range_test_staircase"],
        ),
    ],
)
def test_parameters_of_a_schedule_that_has_no_field_are_known(kind: str, params: list[str]) -> None:
    outcome = translate({**ZERO_3, "scheduler": {"type": kind, "params": dict.fromkeys(params, 1)}}, "unishard")
    assert not outcome.of(Fit.UNSUPPORTED)
    assert "in the training script" in item(outcome, "scheduler.type").note
    assert list(outcome.reading.undecided) == ["scheduler.name"]
    assert item(outcome, params[0]).note == f"belongs to {kind}"


@pytest.mark.parametrize("least", [1, 128, 2.0, "1", 0, 0.5, 1e-10])
def test_the_least_loss_scale_is_no_reason_to_refuse(least: Any) -> None:
    outcome = translate({"train_batch_size": 8, "fp16": {"enabled": True, "min_loss_scale": least}}, "deepspeed")
    assert not outcome.of(Fit.UNSUPPORTED)
    assert ("min_loss_scale" in outcome.document["fp16"]) == (
        least in (1, 128, "1", 2.0)
    )  # DeepSpeed 0.19.8 takes these
    wrong = translate({"train_batch_size": 8, "fp16": {"enabled": True, "min_loss_scale": "low"}}, "deepspeed")
    assert item(wrong, "min_loss_scale").fit is Fit.UNSUPPORTED


# Accelerate.


@pytest.mark.parametrize("word", ["no", False])
def test_no_mixed_precision_beside_a_file_of_deepspeed_decides_nothing(word: Any) -> None:
    document = {**INLINE, "mixed_precision": word, "deepspeed_config": {"deepspeed_config_file": ZERO_3}}
    outcome = translate(document, "unishard")
    assert not outcome.of(Fit.UNSUPPORTED)
    assert outcome.reading.config.precision.compute == "bf16"
    refused = translate({**document, "mixed_precision": "bf16"}, "unishard")
    assert [one.key for one in refused.of(Fit.UNSUPPORTED)] == ["mixed_precision"]


@pytest.mark.parametrize("kind", ["FSDP", "MULTI_GPU", "DEEPSPEED"])
@pytest.mark.parametrize("version", [1, 2])
def test_a_parallelism_config_of_ones_is_as_none(kind: str, version: int) -> None:
    ones = dict.fromkeys(
        (f"parallelism_config_{name}_size" for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")), 1
    )
    file = {
        **ACCELERATE,
        "distributed_type": kind,
        "fsdp_config": {"fsdp_version": version},
        "deepspeed_config": {"zero_stage": 2},
    }
    with_ones = translate({**file, "parallelism_config": ones}, "unishard")
    assert not with_ones.of(Fit.UNSUPPORTED)
    assert with_ones.document == translate(file, "unishard").document
    assert "parallelism_config" not in translate(with_ones.document, "accelerate", from_="unishard").document


# torchtitan.


# hpZ.

HPZ = {**ZERO_3, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}


def test_hpz_is_hybrid_sharding_on_another_engine_and_comes_back() -> None:
    outcome = translate(HPZ, "unishard", overrides=["backend=fsdp"])
    config = outcome.reading.config
    assert (config.sharding.strategy, config.sharding.group_size, config.native) == ("hybrid_shard", 8, {})
    found = item(outcome, "zero_hpz_partition_size")
    assert (found.fit, found.becomes) == (Fit.EQUIVALENT, "sharding.strategy, sharding.group_size")
    back = translate(outcome.document, "deepspeed", overrides=["backend=deepspeed"])
    assert back.document["zero_optimization"]["zero_hpz_partition_size"] == 8
    assert back.document["zero_optimization"]["stage"] == 3


def test_hpz_inside_another_tools_file_is_hybrid_sharding_too() -> None:
    arguments = {"per_device_train_batch_size": 1, "bf16": True, "deepspeed": HPZ}
    assert read(open_source(arguments), overrides=["backend=fsdp"]).config.sharding.group_size == 8


def test_hpz_stays_with_its_engine() -> None:
    config = read(HPZ).config
    assert (config.sharding.strategy, config.native["deepspeed"]) == (
        "full_shard",
        {"zero_optimization": {"zero_hpz_partition_size": 8}},
    )
    assert translate(HPZ, "deepspeed").document["zero_optimization"]["zero_hpz_partition_size"] == 8
    below = {**HPZ, "zero_optimization": {"stage": 2, "zero_hpz_partition_size": 8}}
    assert read(below, overrides=["backend=fsdp"]).config.sharding.strategy == "shard_grad_op"


# A file that is not there.

ABSENT = {**INLINE, "deepspeed_config": {"deepspeed_config_file": "absent/zero3.json"}}
del ABSENT["mixed_precision"]
OF_THE_FILE = [
    "sharding.strategy",
    "precision.compute",
    "training.gradient_clipping",
    "optimizer.name",
    "scheduler.name",
]


def test_nothing_of_a_file_that_is_not_there_is_guessed() -> None:
    outcome = translate(ABSENT, "unishard")
    assert list(outcome.reading.undecided) == OF_THE_FILE
    found = item(outcome, "deepspeed_config_file")
    assert found.fit is Fit.NEEDS_INPUT
    assert (
        "absent/zero3.json was not found: its stage, precision, clipping, optimizer and schedule are unknown"
        in found.note
    )
    assert outcome.document["precision"]["compute"] == "${precision.compute}"


@pytest.mark.parametrize("to", ["accelerate", "lightning", "hf", "unishard"])
def test_the_strategy_alone_does_not_make_it_train_in_fp32(to: str) -> None:
    outcome = translate(ABSENT, to, overrides=["sharding.strategy=full_shard"])
    open_ = [field for field in OF_THE_FILE if field in outcome.reading.undecided]
    assert open_ == OF_THE_FILE[1:]
    text = outcome.text
    assert outcome.status(strict=False) == 1 or "auto" in text or "${precision.compute}" in text


@pytest.mark.parametrize("to", ["accelerate", "lightning"])
def test_a_format_without_a_word_for_what_is_unknown_refuses_it_and_names_what_to_set(to: str) -> None:
    sets = [
        "sharding.strategy=full_shard",
        "training.gradient_clipping=1.0",
        "optimizer.name=adamw",
        "scheduler.name=constant",
    ]
    outcome = translate(ABSENT, to, overrides=sets)
    found = item(outcome, "deepspeed_config_file")
    assert (outcome.status(strict=False), found.fit) == (1, Fit.UNSUPPORTED)
    assert (
        found.note
        == "absent/zero3.json, which was not found, says precision.compute; add it, or --set precision.compute=..."
    )
    decided = translate(ABSENT, to, overrides=[*sets, "precision.compute=bf16"])
    assert decided.status(strict=False) == 0


def test_in_its_own_format_the_name_of_an_absent_file_stays() -> None:
    outcome = translate({**ABSENT, "num_machines": 1}, "accelerate")
    assert outcome.status(strict=False) == 0
    assert outcome.document["deepspeed_config"] == {"deepspeed_config_file": "absent/zero3.json"}
    assert item(outcome, "deepspeed_config_file").fit is Fit.EXACT
    decided = translate(ABSENT, "accelerate", overrides=["sharding.strategy=full_shard"])
    assert decided.status(strict=False) == 1


def test_training_arguments_that_name_an_absent_file_say_what_is_unknown() -> None:
    arguments = {"per_device_train_batch_size": 1, "deepspeed": "absent/ds.json"}
    found = item(translate(arguments, "unishard"), "deepspeed")
    assert "its stage, precision, clipping, offload, optimizer and schedule are unknown" in found.note
    assert set(translate(arguments, "unishard").reading.undecided) >= set(OF_THE_FILE)
    assert translate(arguments, "accelerate").status(strict=False) == 1  # nobody knows the stage
    assert translate(arguments, "accelerate", overrides=["sharding.strategy=full_shard"]).status(strict=False) == 1
    sets = [
        "sharding.strategy=full_shard",
        "training.gradient_clipping=1.0",
        "optimizer.name=adamw",
        "scheduler.name=constant",
    ]
    assert translate(arguments, "accelerate", overrides=[*sets, "precision.compute=bf16"]).status(strict=False) == 0


@pytest.mark.parametrize("name", ["ds_z3.json", "configs/zero2.json", "stage1.json"])
def test_the_name_of_an_absent_file_says_nothing(name: str) -> None:
    arguments = {"per_device_train_batch_size": 1, "bf16": True, "max_grad_norm": 0.5, "deepspeed": name}
    outcome = translate(arguments, "unishard")
    open_ = [field for field in OF_THE_FILE if field in outcome.reading.undecided]
    assert open_ == ["sharding.strategy", "optimizer.name", "scheduler.name"]
    assert outcome.reading.config.training.gradient_clipping == 0.5
    assert translate(arguments, "hf").document["deepspeed"] == name


@pytest.mark.parametrize(
    ("around", "name", "strategy", "offload"),
    [
        (
            {"finetuning_type": "lora", "stage": "sft", "model_name_or_path": "m"},
            "examples/deepspeed/ds_z3_config.json",
            "full_shard",
            "none",
        ),
        (
            {"finetuning_type": "lora", "stage": "sft", "model_name_or_path": "m"},
            "x/examples/deepspeed/ds_z2_offload_config.json",
            "shard_grad_op",
            "cpu",
        ),
        (
            {"base_model": "m", "datasets": [], "sequence_len": 8, "micro_batch_size": 1},
            "deepspeed_configs/zero2.json",
            "shard_grad_op",
            "cpu",
        ),
        (
            {"base_model": "m", "datasets": [], "sequence_len": 8, "micro_batch_size": 1},
            "deepspeed_configs/zero3_bf16.json",
            "full_shard",
            "none",
        ),
    ],
)
def test_what_a_tool_brings_along_is_known(around: dict[str, Any], name: str, strategy: str, offload: str) -> None:
    sizes = {} if "base_model" in around else {"per_device_train_batch_size": 1, "max_grad_norm": 1.0}
    outcome = translate({**around, **sizes, "bf16": True, "learning_rate": 1e-4, "deepspeed": name}, "unishard")
    config = outcome.reading.config
    assert (config.sharding.strategy, config.offload.optimizer, config.precision.compute) == (strategy, offload, "bf16")
    assert "sharding.strategy" not in outcome.reading.undecided
    found = item(outcome, "deepspeed")
    assert found.value == name
    assert "read as the file of this name that comes with" in found.note


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
def test_pure_bf16_decides_what_the_deepspeed_file_of_llamafactory_leaves_open(backend):
    said = {"finetuning_type": "full", "stage": "sft", "per_device_train_batch_size": 1, "pure_bf16": True}
    outcome = translate(
        {**said, "deepspeed": "examples/deepspeed/ds_z2_config.json"},
        "unishard",
        from_="llamafactory",
        overrides=[f"backend={backend}"],
    )
    assert outcome.of(Fit.UNSUPPORTED) == []
    assert (outcome.reading.config.precision.compute, outcome.reading.config.precision.master) == ("bf16", "bf16")
