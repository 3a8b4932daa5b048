"""What is repeated when a document is written in its own format again is what the tool takes."""

from __future__ import annotations

from typing import Any

import pytest

from unishard.config.nested import merge, nested
from unishard.contract.rules import Fit
from unishard.formats import Outcome, translate

ARGUMENTS = {"output_dir": "out", "per_device_train_batch_size": 1}


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


@pytest.mark.parametrize("config", [{"version": 2, "activation_checkpointing": None}, {"auto_wrap_policy": None}, "no"])
def test_what_transformers_would_refuse_of_fsdp_config_is_left_out(config: Any) -> None:
    found = again({**ARGUMENTS, "fsdp": True, "fsdp_config": config}, "hf").document.get("fsdp_config", {})
    assert isinstance(found, dict)
    assert None not in found.values()
