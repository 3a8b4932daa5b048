"""What tools do where their file is silent, beside what it says, or under other names: said in the report, and nothing
refused for it."""

from __future__ import annotations

import io
from typing import Any

import pytest

from unishard.cli.report import ReportForm, write_report
from unishard.contract.rules import Fit
from unishard.formats import Item, Outcome, read, translate
from unishard.formats.files.source import open_source

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


# DeepSpeed's schedules and scale.


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


# hpZ.

HPZ = {**ZERO_3, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}


def test_hpz_inside_another_tools_file_is_hybrid_sharding_too() -> None:
    arguments = {"per_device_train_batch_size": 1, "bf16": True, "deepspeed": HPZ}
    assert read(open_source(arguments), overrides=["backend=fsdp"]).config.sharding.group_size == 8


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


@pytest.mark.parametrize("to", ["accelerate", "hf", "unishard"])
def test_the_strategy_alone_does_not_make_it_train_in_fp32(to: str) -> None:
    outcome = translate(ABSENT, to, overrides=["sharding.strategy=full_shard"])
    open_ = [field for field in OF_THE_FILE if field in outcome.reading.undecided]
    assert open_ == OF_THE_FILE[1:]
    text = outcome.text
    assert outcome.status(strict=False) == 1 or "auto" in text or "${precision.compute}" in text
