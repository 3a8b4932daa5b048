"""What the tools themselves read: clean translations are clean, and ten and more wrong ones are caught."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest

from unishard.config.nested import merge
from unishard.config.topology import Topology
from unishard.formats import Outcome, catalog, translate
from unishard.formats.verify import verify

ZERO = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1, "betas": [0.9, 0.95]}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": 10, "total_num_steps": 100, "warmup_max_lr": 3e-4},
    },
}
SHARDED = {
    "distributed_type": "FSDP",
    "num_processes": 4,
    "mixed_precision": "bf16",
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "fsdp_reshard_after_forward": True,
    },
}
ARGUMENTS = {
    "output_dir": "out",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "learning_rate": 3e-4,
    "max_grad_norm": 0.5,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 10,
    "max_steps": 100,
    "bf16": True,
}
SOURCES: dict[str, dict[str, Any]] = {"deepspeed": ZERO, "accelerate": SHARDED, "hf": ARGUMENTS}
FOUR = Topology(world_size=4, local_world_size=4)


def made(from_: str, to: str, *overrides: str) -> Outcome:
    if from_ == "three":
        document = merge(ZERO, {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none"}}})
        return translate(document, to, from_="deepspeed", overrides=("backend=fsdp",), topology=FOUR)
    return translate(SOURCES[from_], to, from_=from_, overrides=overrides, topology=FOUR)


@pytest.mark.parametrize("from_", SOURCES)
@pytest.mark.parametrize("to", ["unishard", "deepspeed", "accelerate", "hf"])
def test_what_is_right_is_clean(from_: str, to: str) -> None:
    found = verify(made(from_, to))
    assert (found.unreported, found.effective.refused, found.effective.missing) == ([], "", "")
    assert found.clean
    assert found.rows


REMOVED = object()
WRONG: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "another stage": ("deepspeed", "deepspeed", {"zero_optimization": {"stage": 1}}, "sharding.strategy"),
    "no clipping, which is then 1.0": (
        "deepspeed",
        "deepspeed",
        {"gradient_clipping": REMOVED},
        "training.gradient_clipping",
    ),
    "fp32": ("deepspeed", "deepspeed", {"bf16": REMOVED}, "precision.compute"),
    "another rate": ("deepspeed", "deepspeed", {"scheduler": {"params": {"warmup_max_lr": 1e-4}}}, "optimizer.lr"),
    "no offload": (
        "deepspeed",
        "deepspeed",
        {"zero_optimization": {"offload_optimizer": REMOVED}},
        "offload.optimizer",
    ),
    "a window for the script": (
        "deepspeed",
        "deepspeed",
        {"gradient_accumulation_steps": "auto"},
        "training.gradient_accumulation_steps",
    ),
    "one unit of the whole model": (
        "accelerate",
        "accelerate",
        {"fsdp_config": {"fsdp_auto_wrap_policy": "NO_WRAP"}},
        "sharding.units",
    ),
    "one unit of a model that ZeRO gathered module by module": (
        "three",
        "accelerate",
        {"fsdp_config": {"fsdp_auto_wrap_policy": "NO_WRAP"}},
        "sharding.units",
    ),
    "other units": (
        "accelerate",
        "accelerate",
        {"fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": "GPT2Block"}},
        "sharding.units",
    ),
    "parameters that stay": (
        "accelerate",
        "accelerate",
        {"fsdp_config": {"fsdp_reshard_after_forward": False}},
        "sharding.strategy",
    ),
    "another dtype": ("deepspeed", "accelerate", {"mixed_precision": "fp16"}, "precision.compute"),
    "stage 3 for 2": ("deepspeed", "accelerate", {"deepspeed_config": {"zero_stage": 3}}, "sharding.strategy"),
    "another bound": ("hf", "hf", {"max_grad_norm": 1.0}, "training.gradient_clipping"),
    "no warm-up": ("hf", "hf", {"warmup_steps": REMOVED}, "scheduler.warmup_steps"),
    "another schedule": ("hf", "hf", {"lr_scheduler_type": "linear"}, "scheduler.name"),
    "another window": (
        "deepspeed",
        "hf",
        {"gradient_accumulation_steps": 2},
        "training.gradient_accumulation_steps",
    ),
    "other betas": ("deepspeed", "unishard", {"optimizer": {"betas": [0.9, 0.999]}}, "optimizer.betas"),
}


def changed(document: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """The document with values replaced, or removed."""
    kept = {key: value for key, value in document.items() if change.get(key) is not REMOVED}
    for key, value in change.items():
        if isinstance(value, dict):
            kept[key] = changed(kept.get(key, {}), value)
        elif value is not REMOVED:
            kept[key] = value
    return kept


@pytest.mark.parametrize(("from_", "to", "change", "field"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_caught(from_: str, to: str, change: dict[str, Any], field: str) -> None:
    right = made(from_, to)
    document = changed(right.document, change)
    assert document != right.document
    wrong = right._replace(document=document, text=catalog.get(to).render(document, right.reading))
    found = verify(wrong)
    assert [row.field for row in found.unreported] == [field]
    assert not found.clean


def test_what_the_tool_refuses_is_not_clean() -> None:
    right = made("deepspeed", "deepspeed")
    found = verify(right._replace(document=merge(right.document, {"zero_optimization": {"stage": 7}})))
    assert found.effective.refused.startswith("ValidationError")
    assert not found.clean


def test_what_was_asked_for_is_no_surprise() -> None:
    found = verify(made("deepspeed", "deepspeed", "sharding.strategy=full_shard"))
    assert [row.field for row in found.rows if row.differs] == ["sharding.strategy"]
    assert found.clean


def test_a_tool_that_is_not_installed_is_said_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("unishard.formats.verify.consumers.version", version)
    found = verify(made("hf", "accelerate"))
    assert found.effective.missing == "Accelerate is not installed; pip install accelerate"
    assert found.source.missing == "transformers is not installed; pip install transformers"
    assert found.clean


def test_a_tool_that_cannot_be_asked_is_said_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = made("hf", "accelerate")._replace(to="theirs")
    monkeypatch.setattr(catalog, "get", lambda name: SimpleNamespace(tool="Theirs 1"))
    said = verify(outcome).effective.missing
    assert said == "Theirs 1 cannot be verified here: unishard cannot ask it what it makes of a file"


AROUND = {"model_name_or_path": "m", **ARGUMENTS}
TOOLS: dict[str, dict[str, Any]] = {
    "llamafactory": {**AROUND, "stage": "sft", "finetuning_type": "full", "template": "default", "dataset": "d"},
    "trl": {**AROUND, "dataset_name": "d", "assistant_only_loss": True, "warmup_steps": 0, "warmup_ratio": 0.1},
}


@pytest.mark.parametrize("from_", TOOLS)
@pytest.mark.parametrize("to", ["hf", "llamafactory", "trl", "deepspeed"])
def test_tools_around_transformers_are_asked_through_it(from_: str, to: str) -> None:
    found = verify(translate(TOOLS[from_], to, from_=from_, topology=FOUR))
    assert (found.unreported, found.effective.refused, found.effective.missing) == ([], "", "")
    assert found.source.consumer.startswith("transformers ")
    assert {row.field for row in found.rows} >= {
        "training.micro_batch_size",
        "scheduler.warmup_steps",
        "sharding.strategy",
    }


@pytest.mark.parametrize(
    ("key", "value", "field"), [("learning_rate", 1e-3, "optimizer.lr"), ("warmup_steps", 50, "scheduler.warmup_steps")]
)
def test_a_wrong_file_for_a_tool_around_transformers_is_caught(key: str, value: Any, field: str) -> None:
    right = translate(TOOLS["llamafactory"], "trl", from_="llamafactory", topology=FOUR)
    wrong = right._replace(document={**right.document, key: value})
    assert [row.field for row in verify(wrong).unreported] == [field]


def test_what_a_tool_around_transformers_assumes_is_not_taken_for_transformers_default() -> None:
    document = {key: value for key, value in TOOLS["trl"].items() if key not in ("bf16", "learning_rate")}
    found = verify(translate(document, "trl", from_="trl", topology=FOUR))
    assert not {"precision.compute", "optimizer.lr"} & {row.field for row in found.rows}


def test_a_rate_that_transformers_copies_from_the_optimizer_is_not_deepspeeds_default() -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": 10}}
    outcome = translate(
        {**ZERO, "fp16": {"opt_level": "O2"}, "scheduler": scheduler}, "deepspeed", from_="deepspeed", topology=FOUR
    )
    found = verify(outcome)
    assert found.source.refused  # for opt_level, which is left out
    assert not found.unreported


def test_a_placeholder_that_is_kept_is_no_difference() -> None:
    arguments = {**ARGUMENTS, "gradient_accumulation_steps": "${eval:${batch} // 4}"}
    outcome = translate(arguments, "hf", from_="hf", topology=FOUR)
    assert "${eval:${batch} // 4}" in outcome.text
    found = verify(outcome)
    assert found.rows
    assert not found.unreported


def test_a_window_that_is_said_to_accelerate_is_the_trainers() -> None:
    steps = {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 8}}}
    arguments = {key: value for key, value in ARGUMENTS.items() if key != "gradient_accumulation_steps"} | steps
    found = verify(translate(arguments, "hf", from_="hf", topology=FOUR))
    (row,) = (row for row in found.rows if row.field == "training.gradient_accumulation_steps")
    assert (row.source, row.effective, found.unreported) == (8, 8, [])
