"""A translation is read back: what it means otherwise is written out, or a line of the report says it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from accounting import WRITTEN
from documents import SEEDS

from unishard.cli.text_report import listed
from unishard.config.nested import flat
from unishard.config.topology import Topology
from unishard.contract.rules import SCRIPT, Fit
from unishard.formats import Outcome, catalog, translate
from unishard.formats.report.readback import Join, read_back
from unishard.formats.verify import verify

FOUR = Topology(world_size=4, local_world_size=4)
ADAM = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}
FSDP = {
    "distributed_type": "FSDP",
    "num_processes": 4,
    "mixed_precision": "bf16",
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    },
}


def back_of(outcome: Outcome) -> Any:
    return read_back(catalog.get(outcome.to), outcome.document, outcome.reading)


def unnamed(outcome: Outcome) -> set[str]:
    """The fields that the translation decides otherwise, and that no line which people see names."""
    named = {change.field for change in outcome.changes}
    shown = listed(outcome)
    for one in outcome.items:
        if one.fit is not Fit.EXACT and any(one is other for other in shown):
            named |= {*one.entry.effect.fields, *(f"native.{key}" for key in one.entry.effect.native)}
    implied = {"sharding.reshard_after_forward", "sharding.group_size", "precision.loss_scale"}
    keys = {key for one in outcome.items if one.fit is not Fit.EXACT for key in one.becomes.split(", ")}
    found = Join(outcome.reading, {}, back_of(outcome)).different
    return {
        path
        for path, one in found.items()
        if path not in named | implied and one.after.key not in keys and not path.startswith("native.")
    }


@pytest.mark.parametrize("to", ["trl", "llamafactory"])
def test_what_a_script_switches_on_by_itself_is_switched_off(to: str) -> None:
    outcome = translate({**ADAM, "bf16": {"enabled": False}}, to, from_="deepspeed")
    assert back_of(outcome).config.activation_checkpointing == "none"
    assert back_of(outcome).config.precision.compute == "fp32"


def test_what_a_target_cannot_say_is_a_change() -> None:
    outcome = translate(
        {**ADAM, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}}}, "hf", from_="deepspeed"
    )
    assert {change.field for change in outcome.changes if change.before.said} == {"optimizer.no_decay"}
    assert outcome.status(strict=False) == 0
    assert outcome.status(strict=True) == 2


def test_what_the_script_decides_and_the_target_too_is_one_list() -> None:
    outcome = translate(FSDP, "hf", from_="accelerate")
    left = {change.field: change.after.value for change in outcome.changes if not change.before.said}
    assert left.items() >= {"optimizer.lr": 5e-5, "training.seed": 42, "training.gradient_clipping": 1.0}.items()


@pytest.mark.parametrize("to", WRITTEN)
@pytest.mark.parametrize("from_", sorted(SEEDS))
def test_every_difference_is_named(from_: str, to: str) -> None:
    for data in SEEDS[from_]:
        outcome = translate(data, to, from_=from_, topology=FOUR)
        if not outcome.of(Fit.UNSUPPORTED):
            assert unnamed(outcome) == set()


@pytest.mark.parametrize("to", WRITTEN)
@pytest.mark.parametrize("from_", sorted(SEEDS))
def test_no_key_that_is_in_no_output_is_exact(from_: str, to: str) -> None:
    for data in SEEDS[from_]:
        outcome = translate(data, to, from_=from_, topology=FOUR)
        if outcome.of(Fit.UNSUPPORTED) or from_ == to:
            continue
        keys = [f".{key}." for key, _ in flat(outcome.document)]
        back = back_of(outcome)
        for one, entry in zip(outcome.items, outcome.reading.entries, strict=True):
            if (
                one.fit is Fit.EXACT
                and not one.assumed
                and SCRIPT not in one.becomes
                and not one.note
                and not entry.effect.native
            ):
                words = re.findall(r"[A-Za-z_][\w.]*", one.becomes)
                said = any(field in back.decided or field in back.undecided for field in entry.effect.fields)
                assert said or any(f".{word}." in key for word in words for key in keys), one


def test_clipping_is_left_open_where_deepspeed_takes_it_from_the_script() -> None:
    outcome = translate(FSDP, "accelerate", from_="accelerate", overrides=["backend=deepspeed"])
    assert outcome.document["deepspeed_config"]["gradient_clipping"] == "auto"
    assert "clip_grad_norm_ does nothing" in next(
        one.after.origin for one in outcome.changes if one.field == "training.gradient_clipping"
    )
    row = next(row for row in verify(outcome).rows if row.field == "training.gradient_clipping")
    assert row.effective == 1.0
    json = translate(FSDP, "deepspeed", from_="accelerate")
    assert json.document["gradient_clipping"] == "auto"
    assert "training.gradient_clipping" in {one.field for one in json.changes}


def test_block_classes_come_back_from_deepspeed() -> None:
    named = {
        **FSDP,
        "fsdp_config": {**FSDP["fsdp_config"], "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer,LlamaMLP"},
    }
    there = translate(named, "accelerate", from_="accelerate", overrides=["backend=deepspeed"])
    assert not verify(there).effective.refused
    back = translate(there.document, "accelerate", from_="accelerate", overrides=["backend=fsdp"]).document[
        "fsdp_config"
    ]
    assert back["fsdp_transformer_layer_cls_to_wrap"] == "LlamaDecoderLayer,LlamaMLP"
    assert back["fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"


@pytest.mark.parametrize("name", ["trl", "llamafactory"])
def test_epochs_and_the_part_that_warms_up_go_to_the_trainer(name: str) -> None:
    data = {
        "learning_rate": 1e-5,
        "num_train_epochs": 1,
        "warmup_ratio": 0.1,
        "lr_scheduler_type": "cosine",
        "bf16": True,
    }
    document = translate(data, "hf", from_=name).document
    assert document.items() >= {"num_train_epochs": 1, "warmup_steps": 0.1}.items()


def test_how_long_parameters_stay_is_not_rewritten() -> None:
    sizes = {"stage3_max_reuse_distance": 5e8, "stage3_max_live_parameters": 3e8}
    outcome = translate({**ADAM, "zero_optimization": {"stage": 3, **sizes}}, "hf", from_="deepspeed")
    assert {key.rpartition(".")[2]: value for key, value in flat(outcome.document)}.items() >= sizes.items()


def test_written_is_what_is_in_the_file() -> None:
    rows = {
        row.field: row
        for row in verify(translate(FSDP, "accelerate", from_="accelerate", overrides=["backend=deepspeed"])).rows
    }
    assert rows["precision.compute"].written == "bf16"
    assert rows["training.micro_batch_size"].written is None
    assert rows["activation_checkpointing"].written is None


@pytest.mark.parametrize(
    ("name", "document", "key", "written"),
    [
        ("hf", {"output_dir": "o", "learning_rate": 1e-4, "optim": "adamw_hf"}, "optim", "adamw_torch"),
        (
            "accelerate",
            {"distributed_type": "MULTI_GPU", "num_processes": 2, "mixed_precision": False},
            "mixed_precision",
            "no",
        ),
        ("accelerate", {"distributed_type": "MULTI_GPU", "num_processes": 2, "env": {"A": "b"}}, "env", None),
        (
            "deepspeed",
            {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"enabled": False}},
            "tensor_parallel",
            None,
        ),
    ],
)
def test_what_its_own_tool_refuses_is_not_written_again(
    name: str, document: dict[str, Any], key: str, written: object
) -> None:
    again = translate(document, name, from_=name)
    assert again.document.get(key) == written
    assert not verify(again).effective.refused
