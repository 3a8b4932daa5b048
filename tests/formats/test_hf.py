"""TrainingArguments: what each says, what Trainer assumes, and what is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from unishard.config import Config, leaves, value_at
from unishard.config.topology import Topology
from unishard.contract.rules import Fit
from unishard.errors import ConfigError
from unishard.formats import Outcome, read, translate
from unishard.formats.hf.optimizing import NO_DECAY
from unishard.formats.hf.rules import render_arguments

BASE = {"per_device_train_batch_size": 4}


def fields(document: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What a document decides, by field."""
    reading = read(document, "hf", **more)
    return {path: value_at(reading.config, path) for path in reading.decided if path not in reading.undecided}


def item(outcome: Outcome, key: str) -> Any:
    (found,) = [item for item in outcome.items if item.key == key and not item.assumed]
    return found


def of(document: dict[str, Any], key: str, to: str = "unishard") -> Any:
    return item(translate(document, to, from_="hf"), key)


def test_a_config_without_fsdp_counts_for_nothing() -> None:
    document = {**BASE, "fsdp": "", "fsdp_config": {"reshard_after_forward": False}}
    assert of(document, "fsdp_config.reshard_after_forward").note == "only used when fsdp is enabled"
    assert fields(document)["sharding.strategy"] == "no_shard"


def test_a_file_that_fsdp_config_names_is_read(tmp_path: Path) -> None:
    (tmp_path / "fsdp.json").write_text(json.dumps({"fsdp_reshard_after_forward": False}))
    (tmp_path / "args.yaml").write_text(yaml.safe_dump({**BASE, "fsdp": True, "fsdp_config": "fsdp.json"}))
    outcome = translate(tmp_path / "args.yaml", "unishard")
    assert outcome.reading.config.sharding.reshard_after_forward is False
    assert item(outcome, "fsdp_config.fsdp_reshard_after_forward").fit is Fit.EXACT


def test_such_a_file_can_be_read_alone(tmp_path: Path) -> None:
    path = tmp_path / "fsdp_config.json"
    path.write_text(json.dumps({"fsdp_transformer_layer_cls_to_wrap": ["T5Block"], "limit_all_gathers": True}))
    outcome = translate(path, "unishard")
    assert outcome.reading.format == "hf"
    assert outcome.document == {"sharding": {"strategy": "full_shard", "units": ["T5Block"]}} | outcome.document
    assert (
        "training" not in outcome.document
    )  # the file says nothing of it, and Trainer's defaults are not known to hold


AUTO = {
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
}


def test_auto_is_filled_in_from_the_arguments() -> None:
    document = {**BASE, "gradient_accumulation_steps": 2, "bf16": True, "max_grad_norm": 0.5, "deepspeed": AUTO}
    found = fields(document)
    assert found["training.micro_batch_size"] == 4
    assert found["training.gradient_clipping"] == 0.5
    assert found["precision.compute"] == "bf16"
    outcome = translate(document, "unishard", from_="hf")
    assert item(outcome, "deepspeed.gradient_clipping").value == "auto"
    assert not outcome.of(Fit.UNSUPPORTED)


def test_max_grad_norm_is_idle_where_the_json_has_no_gradient_clipping() -> None:
    document = {**BASE, "max_grad_norm": 0.5, "deepspeed": {"zero_optimization": {"stage": 1}}}
    assert "DeepSpeed clips to its default" in of(document, "max_grad_norm").note
    assert fields(document)["training.gradient_clipping"] == 1.0


def test_a_json_that_is_not_there_is_one_decision(tmp_path: Path) -> None:
    (tmp_path / "args.yaml").write_text(
        yaml.safe_dump({**BASE, "bf16": True, "deepspeed": "examples/ds_z2_config.json"})
    )
    outcome = translate(tmp_path / "args.yaml", "unishard")
    found = item(outcome, "deepspeed")
    assert found.fit is Fit.NEEDS_INPUT
    assert "was not found" in found.note
    assert outcome.document["backend"] == "deepspeed"
    assert outcome.document["sharding"]["strategy"] == "${sharding.strategy}"  # whatever its name says
    assert outcome.document["precision"]["compute"] == "bf16"  # which transformers would refuse to see contradicted


def test_a_json_without_a_format_gets_that_of_the_arguments() -> None:
    found = fields({**BASE, "bf16": True, "deepspeed": {"zero_optimization": {"stage": 2}}})
    assert (found["precision.compute"], found["precision.reduce"]) == ("bf16", "bf16")


def test_broken_json_is_one_decision_too(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"a": [}')
    (tmp_path / "args.yaml").write_text(yaml.safe_dump({**BASE, "deepspeed": "ds.json"}))
    assert item(translate(tmp_path / "args.yaml", "unishard"), "deepspeed").fit is Fit.NEEDS_INPUT


FACTORY = {
    "model_name_or_path": "m",
    "stage": "sft",
    "finetuning_type": "full",
    "template": "llama3",
    "output_dir": "out",
    "brand_new_key": {"a": {"b": 1}},
    **BASE,
}


def test_without_bf16_and_fp16_the_dtype_of_the_model_counts() -> None:
    assert fields({**FACTORY, "torch_dtype": "bfloat16"})["precision.compute"] == "bf16"
    assert fields({**FACTORY, "torch_dtype": "bfloat16", "bf16": False})["precision.master"] == "bf16"
    assert "precision.master" not in fields({**FACTORY, "torch_dtype": "bfloat16", "bf16": True})


def test_keys_about_nothing_but_the_tool_are_kept_in_its_own_format() -> None:
    outcome = translate(
        {**BASE, "logging_steps": 5, "fsdp": True, "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}},
        "hf",
        from_="hf",
    )
    assert outcome.document["logging_steps"] == 5
    assert outcome.document["fsdp_config"]["state_dict_type"] == "FULL_STATE_DICT"
    assert "logging_steps" not in translate({**BASE, "logging_steps": 5}, "unishard", from_="hf").text


CONFIG = {
    "backend": "fsdp",
    "sharding": {"strategy": "full_shard", "units": ["T5Block"], "reshard_after_forward": False},
    "precision": {"compute": "bf16", "reduce": "bf16"},
    "offload": "cpu",
    "activation_checkpointing": "full",
    "training": {"micro_batch_size": 2, "gradient_clipping": 0.5, "seed": 1},
    "optimizer": {"lr": 1e-5, "weight_decay": 0.1, "no_decay": [NO_DECAY]},
    "scheduler": {"name": "cosine", "warmup_steps": 5, "total_steps": 50},
}


def test_what_is_written_for_fsdp() -> None:
    outcome = translate(CONFIG, "hf")
    assert outcome.document == {
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "reshard_after_forward": False,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["T5Block"],
            "cpu_offload": True,
            "activation_checkpointing": True,
        },
        "bf16": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_grad_norm": 0.5,
        "seed": 1,
        "optim": "adamw_torch",
        "learning_rate": 1e-5,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 5,
        "max_steps": 50,
        "save_strategy": "no",
    }
    assert yaml.safe_load(outcome.text) == outcome.document


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
def test_every_field_of_the_schema_gets_a_word(backend: str) -> None:
    outcome = translate({"backend": backend}, "hf")
    assert {item.key for item in outcome.items} == {path for path, _ in leaves(Config)} - {"native"}
    assert not outcome.of(Fit.UNSUPPORTED)
    assert all(item.becomes or item.note or item.fit is Fit.EXACT for item in outcome.items)


def test_a_third_engine_is_refused() -> None:
    reading = read({"backend": "fsdp"}, "unishard")._replace(config=Config(backend="megatron"))
    with pytest.raises(ConfigError, match="transformers runs fsdp and deepspeed, not megatron"):
        render_arguments(reading, Topology(), "hf")


@pytest.mark.parametrize("name", ["hf", "llamafactory", "trl"])
def test_what_trainer_assumes_holds_beside_an_optimizer_that_is_left_to_the_script(name: str) -> None:
    document = translate({"output_dir": "o", "learning_rate": 1e-4, "optim": "adafactor"}, name, from_="hf").document
    assert document.get("weight_decay", 0.0) == 0.0
