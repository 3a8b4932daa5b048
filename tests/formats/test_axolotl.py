"""axolotl's YAML: what each key says, what axolotl assumes, and what is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from unishard.config import value_at
from unishard.config.topology import Topology
from unishard.contract.rules import Fit
from unishard.formats import Outcome, read, translate
from unishard.formats.hf.optimizing import NO_DECAY

BASE = {"base_model": "m", "sequence_len": 512, "datasets": [{"path": "d"}], "learning_rate": 1e-4}
FSDP = {"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True}}


def fields(document: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What a document decides, by field."""
    reading = read(BASE | document, **more)
    assert reading.format == "axolotl"
    return {path: value_at(reading.config, path) for path in reading.decided if path not in reading.undecided}


def of(document: dict[str, Any], key: str, to: str = "unishard") -> Any:
    return item(translate(BASE | document, to), key)


def item(outcome: Outcome, key: str) -> Any:
    (found,) = [item for item in outcome.items if item.key == key and not item.assumed]
    return found


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"micro_batch_size": 2}, {"training.micro_batch_size": 2}),
        ({"gradient_accumulation_steps": 4}, {"training.gradient_accumulation_steps": 4}),
        ({"micro_batch_size": 2, "batch_size": 8}, {"training.gradient_accumulation_steps": 4}),
        ({"optimizer": "adamw_bnb_8bit"}, {"optimizer.name": "adamw"}),
        ({"optimizer": "sgd", "optim_args": {"momentum": 0.9}}, {"optimizer.name": "sgd", "optimizer.momentum": 0.9}),
        ({"weight_decay": 0.1}, {"optimizer.weight_decay": 0.1, "optimizer.no_decay": [NO_DECAY]}),
        ({"ddp_broadcast_buffers": False}, {"training.buffers": "local"}),
        ({"tf32": True, "deepspeed": {"zero_optimization": {"stage": 3}}}, {"precision.matmul": "tf32"}),
        ({"tf32": "auto"}, {"precision.matmul": "tf32"}),
        ({"tf32": None, "torch_compile": True}, {"precision.matmul": None}),
        ({"max_grad_norm": 0.3}, {"training.gradient_clipping": 0.3}),
        (
            {"lr_scheduler": "constant_with_warmup", "warmup_steps": 5},
            {"scheduler.name": "constant", "scheduler.warmup_steps": 5},
        ),
        ({"max_steps": 50, "cosine_min_lr_ratio": 0.1}, {"scheduler.name": "cosine", "scheduler.min_lr_ratio": 0.1}),
        ({"max_steps": 1000}, {"scheduler.total_steps": 1000, "scheduler.warmup_steps": 30}),
        ({"max_steps": 50000}, {"scheduler.warmup_steps": 100}),
        ({"max_steps": 50, "warmup_ratio": 0.1}, {"scheduler.warmup_steps": 5}),
        ({"bf16": True}, {"precision.compute": "bf16", "precision.master": "bf16", "precision.reduce": "bf16"}),
        ({"bf16": True, **FSDP}, {"precision.compute": "bf16", "precision.master": None, "precision.reduce": "bf16"}),
        ({"bf16": True, "adapter": "lora"}, {"precision.compute": "bf16", "precision.master": None}),
        ({"bf16": "auto", "fp16": True}, {"precision.compute": "fp16"}),
        ({"bf16": False}, {"precision.compute": None}),
        ({"gradient_checkpointing": "offload"}, {"activation_checkpointing": "full"}),
        ({"fsdp": ["full_shard", "auto_wrap"]}, {"backend": "fsdp", "sharding.strategy": "full_shard"}),
        ({"fsdp_version": 2, "fsdp": ["shard_grad_op"]}, {"sharding.reshard_after_forward": False}),
        (
            {"fsdp_version": 2, "fsdp_config": {"offload_params": True}},
            {"offload.params": "cpu", "offload.optimizer": "cpu"},
        ),
        ({"fsdp_config": {"fsdp_offload_params": True, "fsdp_version": 2}}, {"offload.params": "cpu"}),
        ({"fsdp_version": 2, "fsdp_config": {"transformer_layer_cls_to_wrap": "A,B"}}, {"sharding.units": ["A", "B"]}),
        (
            {"fsdp_version": 2, "fsdp_config": {"offload_params": True, "cpu_offload_pin_memory": False}},
            {"offload.pin_memory": False},
        ),
        (
            {"fsdp_config": {"activation_checkpointing": True}, "gradient_checkpointing": False},
            {"activation_checkpointing": "full"},
        ),
        (
            {**FSDP, "dp_replicate_size": 2, "dp_shard_size": 4},
            {"sharding.strategy": "hybrid_shard", "sharding.group_size": 4},
        ),
        ({**FSDP, "dp_shard_size": 4}, {"sharding.strategy": "full_shard"}),
        (
            {"deepspeed": {"zero_optimization": {"stage": 3}}},
            {"backend": "deepspeed", "sharding.strategy": "full_shard"},
        ),
        ({}, {"backend": "fsdp", "sharding.strategy": "no_shard", "training.micro_batch_size": 1, "training.seed": 42}),
    ],
)
def test_a_key_says(document: dict[str, Any], expected: dict[str, Any]) -> None:
    found = fields(document)
    assert {path: found.get(path) for path in expected} == expected


def test_keys_that_axolotl_does_not_know_are_dropped_with_a_hint() -> None:
    found = of({"gradient_acumulation_steps": 4}, "gradient_acumulation_steps")
    assert found.fit is Fit.IGNORED
    assert "axolotl 0.18.0 does not know this key" in found.note
    assert "did you mean 'gradient_accumulation_steps'?" in found.note


def test_a_deepspeed_file_is_filled_in_from_axolotls_keys(tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text(
        '{"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"}'
    )
    (tmp_path / "a.yaml").write_text(
        yaml.safe_dump({**BASE, "micro_batch_size": 3, "max_grad_norm": 0.7, "deepspeed": "zero.json"})
    )
    outcome = translate(tmp_path / "a.yaml", "unishard")
    assert (
        outcome.document["training"] | {"micro_batch_size": 3, "gradient_clipping": 0.7} == outcome.document["training"]
    )
    assert item(outcome, "deepspeed.train_micro_batch_size_per_gpu").fit is Fit.EXACT


def test_keys_about_the_model_are_kept_in_axolotls_own_format() -> None:
    document = {**BASE, "lora_r": 8, "bf16": True, **FSDP, "micro_batch_size": 2}
    outcome = translate(document, "axolotl")
    assert (
        outcome.document.items()
        >= {**BASE, "lora_r": 8, "micro_batch_size": 2, "bf16": True, "fsdp_version": 2}.items()
    )
    assert translate(outcome.document, "axolotl").document == outcome.document


CONFIG = {
    "backend": "fsdp",
    "sharding": {"strategy": "hybrid_shard", "group_size": 2, "units": ["T5Block"]},
    "precision": {"compute": "bf16", "reduce": "bf16"},
    "offload": {"params": "cpu", "optimizer": "cpu", "pin_memory": False},
    "activation_checkpointing": "full",
    "training": {"micro_batch_size": 2},
    "optimizer": {"lr": 1e-5, "weight_decay": 0.0},
    "scheduler": {"name": "cosine", "warmup_steps": 5, "total_steps": 50, "min_lr_ratio": 0.1},
}


def test_what_is_written() -> None:
    outcome = translate(CONFIG, "axolotl", from_="unishard", topology=Topology(4, 4))
    assert outcome.document == {
        "fsdp_version": 2,
        "fsdp_config": {
            "reshard_after_forward": True,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": "T5Block",
            "offload_params": True,
            "cpu_offload_pin_memory": False,
            "activation_checkpointing": True,
        },
        "dp_replicate_size": 2,
        "dp_shard_size": 2,
        "bf16": True,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_grad_norm": 0.0,
        "seed": 0,
        "optimizer": "adamw_torch",
        "learning_rate": 1e-5,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.0,
        "lr_scheduler": "cosine",
        "cosine_min_lr_ratio": 0.1,
        "warmup_steps": 5,
        "max_steps": 50,
        "save_strategy": "no",
    }
    assert yaml.safe_load(outcome.text) == outcome.document
