"""What is repeated when a document is written in its own format again is what the tool takes."""

from __future__ import annotations

from typing import Any

import pytest

from unishard.config.nested import flat, merge, nested
from unishard.contract.rules import Fit
from unishard.formats import Outcome, translate

ARGUMENTS = {"output_dir": "out", "per_device_train_batch_size": 1}
GPUS = {"distributed_type": "MULTI_GPU", "num_processes": 2, "num_machines": 1}


def again(document: dict[str, Any], name: str) -> Outcome:
    """A document in its own format."""
    return translate(document, name, from_=name)


def stage(number: int, key: str, value: Any) -> dict[str, Any]:
    """A DeepSpeed config with one more key."""
    base = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_optimization": {"stage": number}}
    return merge(base, nested({key: value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fp16.loss_scale_window", "many"),
        ("fp16.min_loss_scale", True),
        ("fp16.hysteresis", []),
        ("fp16.auto_cast", 2),
        ("bf16.immediate_grad_update", "perhaps"),
        ("zero_optimization.allgather_bucket_size", -1),
        ("zero_optimization.stage3_max_live_parameters", "1e9"),
        ("zero_optimization.offload_optimizer.cpuadam_cores_perc", 2),
        ("tensorboard", [1]),
        ("tensorboard", {"enabled": True, "job_name": 3}),
        ("wandb", {"name": "x"}),
        ("comms_logger", {"prof_ops": "all"}),
        ("timers", {"throughput": {"enabled": "x"}}),
        ("activation_checkpointing", "full"),
        ("autotuning", []),
        ("checkpoint", {"tag_validation": "perhaps"}),
    ],
)
def test_deepspeed_refuses_a_value_that_nothing_reads(key: str, value: Any) -> None:
    found = next(item for item in again(stage(2, key, value), "deepspeed").items if item.key == key)
    assert found.fit is Fit.UNSUPPORTED
    assert found.note.startswith("must ")
    assert ";" in found.note


def test_a_name_with_a_dot_stands_for_no_key_in_a_block() -> None:
    document = {"optimizer": {"type": "AdamW"}, "optimizer.type": "auto"}
    assert translate(document, "unishard", from_="deepspeed").reading.config.optimizer.name == "adamw"
    assert "optimizer.name" in translate(document, "unishard", from_="deepspeed").reading.decided


def test_a_name_that_deepspeed_has_dropped_is_not_repeated() -> None:
    outcome = again(stage(3, "zero_optimization.cpu_offload_params", False), "deepspeed")
    assert "cpu_offload_params" not in outcome.document["zero_optimization"]


@pytest.mark.parametrize(
    "key", ["fp16.min_loss_scale", "zero_optimization.sub_group_size", "zero_optimization.reduce_scatter"]
)
def test_null_is_left_out_of_deepspeeds_json(key: str) -> None:
    outcome = again(stage(3, key, None), "deepspeed")
    assert outcome.status(strict=False) == 0
    assert key not in dict(flat(outcome.document))


@pytest.mark.parametrize(
    ("number", "key", "value", "kept"),
    [
        (2, "zero_optimization.compute_grad_norm", False, True),
        (3, "zero_optimization.compute_grad_norm", False, False),
        (3, "zero_optimization.offload_optimizer.ratio", 0.5, True),
        (2, "zero_optimization.offload_optimizer.ratio", 0.5, False),
        (2, "fp16.hysteresis", "auto", True),
        (2, "fp16.min_loss_scale", 0, True),
        (2, "tensorboard", {"enabled": "auto", "output_path": "logs"}, True),
        (2, "checkpoint", {"tag_validation": "WARN"}, True),
    ],
)
def test_deepspeed_takes_what_is_repeated(number: int, key: str, value: Any, kept: bool) -> None:
    outcome = again(stage(number, key, value), "deepspeed")
    assert outcome.status(strict=False) == 0
    assert (merge(outcome.document, nested({key: value})) == outcome.document) is kept


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("save_steps", {}),
        ("save_strategy", False),
        ("eval_strategy", "never"),
        ("hub_strategy", 3),
        ("output_dir", 3),
        ("dataloader_prefetch_factor", 2),
        ("torch_empty_cache_steps", 0),
        ("accelerator_config", [1]),
        ("ddp_backend", "no"),
        ("load_best_model_at_end", True),
    ],
)
def test_transformers_refuses_a_value_about_files(key: str, value: Any) -> None:
    found = next(item for item in again({**ARGUMENTS, key: value}, "hf").items if item.key == key)
    assert found.fit is Fit.UNSUPPORTED


@pytest.mark.parametrize(
    "arguments",
    [
        {"logging_steps": 0, "logging_strategy": "epoch"},
        {"dataloader_prefetch_factor": 2, "dataloader_num_workers": 1},
        {"load_best_model_at_end": True, "save_strategy": "epoch", "eval_strategy": "epoch"},
        {"eval_steps": None, "save_steps": 0.1, "save_strategy": "best", "debug": "underflow_overflow"},
    ],
)
def test_transformers_takes_what_is_repeated(arguments: dict[str, Any]) -> None:
    outcome = again({**ARGUMENTS, **arguments}, "hf")
    assert outcome.status(strict=False) == 0
    assert {key: outcome.document.get(key) for key in arguments} == arguments


@pytest.mark.parametrize("config", [{"version": 2, "activation_checkpointing": None}, {"auto_wrap_policy": None}, "no"])
def test_what_transformers_would_refuse_of_fsdp_config_is_left_out(config: Any) -> None:
    found = again({**ARGUMENTS, "fsdp": True, "fsdp_config": config}, "hf").document.get("fsdp_config", {})
    assert isinstance(found, dict)
    assert None not in found.values()


def test_text_for_a_number_is_written_as_one() -> None:
    assert again({**ARGUMENTS, "warmup_steps": "1e-2"}, "hf").document["warmup_steps"] == 0.01


def test_an_argument_that_deepspeed_decides_is_not_repeated_where_it_is_wrong() -> None:
    deepspeed = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 1}}
    assert again({**ARGUMENTS, "optim": "adamm", "deepspeed": deepspeed}, "hf").document["optim"] == "adamw_torch"


@pytest.mark.parametrize(
    ("key", "value", "status"),
    [
        ("gpu_ids", "all", 0),
        ("gpu_ids", "0,1", 0),
        ("gpu_ids", "0", 1),
        ("gpu_ids", 0, 1),
        ("gpu_ids", [0, 1], 1),
        ("main_process_port", None, 0),
        ("main_process_port", 29501, 0),
        ("main_process_port", "none", 1),
        ("main_process_port", 1e9, 1),
    ],
)
def test_accelerate_takes_what_is_repeated(key: str, value: Any, status: int) -> None:
    assert again({**GPUS, key: value}, "accelerate").status(strict=False) == status
