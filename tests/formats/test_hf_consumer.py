"""transformers accepts what is written, and reads in it what was meant."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trl
import yaml
from accelerate.state import AcceleratorState
from transformers import TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from unishard.formats import catalog, read, translate


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """transformers and Accelerate keep what they were told last."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)
    unset_hf_deepspeed_config()


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Builds TrainingArguments on the CPU, as a script would from the text of a file."""
    monkeypatch.delenv("FSDP_CPU_RAM_EFFICIENT_LOADING", raising=False)

    def build(text: str) -> TrainingArguments:
        AcceleratorState._reset_state(True)
        return TrainingArguments(**{**yaml.safe_load(text), "use_cpu": True, "output_dir": str(tmp_path)})

    return build


def test_every_argument_has_a_row() -> None:
    assert {field.name for field in dataclasses.fields(TrainingArguments)} <= set(catalog.get("hf").keys)


@pytest.mark.parametrize(
    "name", ["SFTConfig", "DPOConfig", "GRPOConfig", "RewardConfig", "ModelConfig", "ScriptArguments"]
)
def test_every_argument_of_trl_has_a_row(name: str) -> None:
    known = {*catalog.get("hf").keys, *catalog.get("trl").own}
    assert {field.name for field in dataclasses.fields(getattr(trl, name))} <= known


STRATEGIES = {"no_shard": None, "shard_optimizer": False, "shard_grad_op": False, "full_shard": True}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fsdp_is_what_was_meant(strategy: str, arguments: Any) -> None:
    config = {"backend": "fsdp", "sharding": strategy, "precision": "bf16", "activation_checkpointing": "full"}
    built = arguments(translate(config, "hf").text)
    assert built.mixed_precision == "bf16"
    if strategy == "no_shard":
        assert built.fsdp_plugin_args is None
        assert built.activation_checkpointing is True
    else:
        assert built.fsdp_plugin_args["fsdp_version"] == 2
        assert built.fsdp_plugin_args["reshard_after_forward"] is STRATEGIES[strategy]
        assert built.fsdp_plugin_args["activation_checkpointing"] is True
        assert built.fsdp_plugin_args["auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"


def test_units_and_offload_reach_the_plugin(arguments: Any) -> None:
    built = arguments(translate({"sharding": {"units": ["A", "B"]}, "offload": "cpu"}, "hf").text)
    assert built.fsdp_plugin_args["transformer_cls_names_to_wrap"] == "A,B"
    assert built.fsdp_plugin_args["cpu_offload"] is True


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("strategy", "stage"), [("no_shard", 0), ("shard_optimizer", 1), ("shard_grad_op", 2), ("full_shard", 3)]
)
def test_deepspeed_is_what_was_meant(strategy: str, stage: int, compute: str, arguments: Any) -> None:
    training = {"micro_batch_size": 3, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
    config = {"backend": "deepspeed", "sharding": strategy, "precision": compute, "training": training}
    found = arguments(translate(config, "hf").text).hf_deepspeed_config
    assert not found.mismatches
    assert found.get_value("zero_optimization.stage", 0) == stage
    assert [found.is_true(f"{name}.enabled") for name in ("bf16", "fp16")] == [compute == "bf16", compute == "fp16"]
    assert found.config["train_micro_batch_size_per_gpu"] == 3
    assert found.config["gradient_accumulation_steps"] == 2
    assert found.config["gradient_clipping"] == 0.5


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({"name": "adamw", "betas": [0.9, 0.95]}, {"optim": "adamw_torch", "adam_beta2": 0.95}),
        (
            {"name": "sgd", "momentum": 0.9, "nesterov": True},
            {"optim": "sgd", "optim_args": "momentum=0.9,nesterov=true"},
        ),
        ({"name": "adagrad", "eps": 1e-6}, {"optim": "adagrad", "optim_args": "eps=1e-06"}),
        ({"name": "lion"}, {"optim": "lion_32bit", "adam_beta2": 0.99}),
    ],
)
def test_optimizers_are_what_was_meant(optimizer: dict[str, Any], expected: dict[str, Any], arguments: Any) -> None:
    built = arguments(translate({"optimizer": {**optimizer, "lr": 1e-5}}, "hf", from_="unishard").text)
    assert built.learning_rate == 1e-5
    assert {name: getattr(built, name) for name in expected} == expected


def test_schedules_are_the_same_curve(arguments: Any) -> None:
    """Learning rates of transformers' own schedules against unishard's closed form."""
    import torch
    from transformers import get_scheduler

    from unishard.config import Scheduler
    from unishard.engine.optim.schedule import factor

    for name, end in [
        ("constant", 0.0),
        ("linear", 0.0),
        ("linear", 0.2),
        ("cosine", 0.0),
        ("cosine", 0.1),
        ("inverse_sqrt", 0.0),
        ("wsd", 0.0),
        ("wsd", 0.1),
    ]:
        shape = {"total_steps": 20, "min_lr_ratio": end} if name in ("linear", "cosine", "wsd") else {}
        decay = {"decay_steps": 8, "decay_type": "sqrt", "warmup_start_ratio": end} if name == "wsd" else {}
        section = {"name": name, "warmup_steps": 4, **shape, **decay}
        built = arguments(translate({"optimizer": {"lr": 0.5}, "scheduler": section}, "hf", from_="unishard").text)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
        kwargs = dict(built.lr_scheduler_kwargs or {})
        scheduler = get_scheduler(
            built.lr_scheduler_type, optimizer, built.get_warmup_steps(20), 20, scheduler_specific_kwargs=kwargs
        )
        for update in range(20):
            assert optimizer.param_groups[0]["lr"] == pytest.approx(
                0.5 * factor(Scheduler.model_validate(section), update), abs=1e-12
            )
            optimizer.step()
            scheduler.step()


def test_mismatches_are_those_that_transformers_finds(arguments: Any) -> None:
    config = {"zero_optimization": {}, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5}
    document = {"per_device_train_batch_size": 4, "deepspeed": config}
    told = arguments(yaml.safe_dump(document)).hf_deepspeed_config.mismatches
    stopped = [entry for entry in read(document, "hf").entries if "transformers refuses this" in entry.effect.note]
    refused = {entry.key.removeprefix("deepspeed.") for entry in stopped}
    assert (
        refused
        == {line.split()[2].split("=")[0] for line in told}
        == {"train_micro_batch_size_per_gpu", "gradient_clipping"}
    )
