"""`--with`: what a command or TrainingArguments say fills what a config leaves open, and never changes what it decides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unishard.config import value_at
from unishard.config.nested import flat
from unishard.config.topology import Topology
from unishard.contract.rules import Fit
from unishard.errors import ConfigError
from unishard.formats import Outcome, translate
from unishard.formats.advice.remedies import remedy
from unishard.formats.files.source import open_source

AUTO: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 500, "initial_scale_power": 16, "hysteresis": 2},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
COMMAND = """deepspeed --num_gpus 4 run.py \\
    --deepspeed ds.json --output_dir out --own_switch \\
    --per_device_train_batch_size 2 --gradient_accumulation_steps 4 \\
    --learning_rate 1e-4 --warmup_steps 10 --max_steps 100 \\
    --bf16 --logging_steps 1
"""
FSDP = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}
ZERO = {"distributed_type": "DEEPSPEED", "num_processes": 4, "deepspeed_config": {"gradient_accumulation_steps": 8}}


def with_command(document: Any, to: str = "unishard", *, change: tuple[str, str] = ("", ""), **more: Any) -> Outcome:
    return translate(document, to, with_=COMMAND.replace(*change), **more)


def fields(outcome: Outcome) -> dict[str, Any]:
    reading = outcome.reading
    return {path: value_at(reading.config, path) for path in reading.decided if path not in reading.undecided}


EXPECTED = {
    "precision.compute": "bf16",
    "training.micro_batch_size": 2,
    "training.gradient_accumulation_steps": 4,
    "training.gradient_clipping": 1.0,
    "training.seed": 42,
    "optimizer.name": "adamw",
    "optimizer.lr": 1e-4,
    "optimizer.betas": (0.9, 0.999),
    "optimizer.eps": 1e-8,
    "optimizer.weight_decay": 0.0,
    "scheduler.name": "linear",
    "scheduler.warmup_steps": 10,
    "scheduler.total_steps": 100,
}


def test_every_auto_of_a_deepspeed_file_is_filled() -> None:
    outcome = with_command(AUTO)
    assert fields(outcome).items() >= EXPECTED.items()
    assert not outcome.reading.undecided
    assert not outcome.status(strict=False)
    assert outcome.reading.topology == Topology(4, 4)
    assert outcome.launch == "torchrun --nproc-per-node 4 train.py"
    assert outcome.supplied
    assert outcome.supplied.unknown == ("own_switch",)


def test_the_report_says_where_each_value_comes_from() -> None:
    outcome = with_command(AUTO)
    places = {item.key: item.place for item in outcome.items if item.supplied}
    assert places["learning_rate"] == "the command"
    assert places["per_device_train_batch_size"] == "the command"
    assert places["adam_beta1"] == "default of TrainingArguments (transformers 5.23)"
    (warmup,) = [item for item in outcome.items if item.key == "scheduler.params.warmup_num_steps"]
    assert (warmup.place, warmup.fit) == ("the command", Fit.EXACT)


def test_a_deepspeed_file_becomes_the_one_that_transformers_makes_of_it(tmp_path: Path) -> None:
    outcome = with_command(AUTO, "deepspeed")
    expected: dict[str, Any] = {
        **AUTO,
        "fp16": {**AUTO["fp16"], "enabled": False},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-4, "warmup_num_steps": 10, "total_num_steps": 100},
        },
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 2,
    }
    assert dict(flat(json.loads(outcome.text))).items() >= dict(flat(expected)).items()
    pytest.importorskip("transformers")
    pytest.importorskip("deepspeed")
    from transformers import TrainingArguments

    document = json.loads(json.dumps(AUTO))
    built = TrainingArguments(
        output_dir=str(tmp_path),
        deepspeed=document,
        use_cpu=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        learning_rate=1e-4,
        warmup_steps=10,
        max_steps=100,
        bf16=True,
    )
    filled = built.hf_deepspeed_config.config
    assert filled["optimizer"] == expected["optimizer"]
    assert {
        key: filled[key]
        for key in ("gradient_accumulation_steps", "gradient_clipping", "train_micro_batch_size_per_gpu")
    } == {
        key: expected[key]
        for key in ("gradient_accumulation_steps", "gradient_clipping", "train_micro_batch_size_per_gpu")
    }


def test_without_the_ranks_the_product_is_left_out() -> None:
    outcome = with_command(AUTO, "deepspeed", change=("--num_gpus 4 ", ""))
    assert "train_batch_size" not in outcome.document
    assert with_command(AUTO, "deepspeed", topology=Topology(8, 8)).document["train_batch_size"] == 64


@pytest.mark.parametrize(
    ("key", "value", "change", "both"),
    [
        ("train_micro_batch_size_per_gpu", 4, ("", ""), "per_device_train_batch_size is 2 (the command)"),
        ("gradient_clipping", 0.5, ("", ""), "max_grad_norm is 1.0 (default of TrainingArguments (transformers 5.23))"),
        (
            "bf16",
            {"enabled": True},
            ("--bf16", ""),
            "bf16 or bf16_full_eval is false (default of TrainingArguments (transformers 5.23))",
        ),
    ],
)
def test_what_transformers_refuses_as_a_mismatch_is_refused(
    key: str, value: Any, change: tuple[str, str], both: str
) -> None:
    outcome = with_command({**AUTO, key: value}, change=change)
    (item,) = outcome.of(Fit.UNSUPPORTED)
    assert item.key.startswith(key)
    assert both in item.note
    assert outcome.status(strict=False) == 1


def test_set_settles_a_mismatch() -> None:
    outcome = with_command({**AUTO, "gradient_clipping": 0.5}, overrides=["training.gradient_clipping=0.25"])
    assert fields(outcome)["training.gradient_clipping"] == 0.25


def test_accelerates_file_is_filled(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(AUTO))
    path = tmp_path / "acc.yaml"
    path.write_text(
        json.dumps({"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}})
    )
    outcome = with_command(path)
    assert fields(outcome).items() >= EXPECTED.items()
    assert not outcome.reading.undecided
    inline = {
        "distributed_type": "DEEPSPEED",
        "mixed_precision": "bf16",
        "deepspeed_config": {"zero_stage": 2, "gradient_clipping": "auto"},
    }
    outcome = with_command(inline, change=("--bf16", "--bf16 --max_grad_norm 0.5"))
    assert (
        fields(outcome).items()
        >= {**EXPECTED, "training.gradient_clipping": 0.5, "sharding.strategy": "shard_grad_op"}.items()
    )
    assert not outcome.status(strict=False)


def test_a_launcher_for_another_engine_decides_no_engine(tmp_path: Path) -> None:
    path = tmp_path / "acc.yaml"
    path.write_text(json.dumps({**FSDP, "mixed_precision": "bf16", "num_processes": 2}))
    outcome = translate(AUTO, "unishard", with_=path)
    found = fields(outcome)
    assert (found["backend"], found["precision.compute"], outcome.reading.topology) == (
        "deepspeed",
        "bf16",
        Topology(2, 2),
    )
    assert not outcome.of(Fit.UNSUPPORTED)


def test_a_file_of_fsdp_gets_the_loop() -> None:
    found = fields(with_command(FSDP, change=("--deepspeed ds.json", "--deepspeed other.json")))
    assert found.items() >= {**EXPECTED, "backend": "fsdp", "sharding.strategy": "full_shard"}.items()


def test_a_contradiction_names_both_values() -> None:
    (item,) = with_command(ZERO).of(Fit.UNSUPPORTED)
    assert (item.key, item.place) == ("gradient_accumulation_steps", "the command")
    assert "deepspeed_config.gradient_accumulation_steps, which is 8" in item.note


@pytest.mark.parametrize("document", [FSDP, {**ZERO, "deepspeed_config": {"zero_stage": 2}}])
@pytest.mark.parametrize("said", ["no", "fp16"])
def test_the_precision_of_the_arguments_counts_more_than_accelerates(document: dict[str, Any], said: str) -> None:
    outcome = with_command({**document, "mixed_precision": said})
    precision = fields(with_command({**document, "mixed_precision": "bf16"}))
    assert not outcome.of(Fit.UNSUPPORTED)
    assert {key: value for key, value in fields(outcome).items() if key.startswith("precision.")} == {
        key: value for key, value in precision.items() if key.startswith("precision.")
    }
    notes = {item.key: item.note for item in outcome.items}
    assert notes["mixed_precision"] == "the command says bf16, which counts more"
    assert with_command({**document, "mixed_precision": said}, "accelerate").document["mixed_precision"] == said


def test_trainingarguments_in_two_places_are_read_as_one() -> None:
    document = {"per_device_train_batch_size": 2, "lr_scheduler_type": "cosine"}
    found = fields(with_command(document))
    assert found.items() >= {**EXPECTED, "scheduler.name": "cosine"}.items()
    (item,) = with_command({**document, "learning_rate": 2e-4}).of(Fit.UNSUPPORTED)
    assert (item.key, item.value, item.note) == (
        "learning_rate",
        1e-4,
        "is 0.0002 in the config; make them equal, or leave one out",
    )


def test_a_yaml_of_arguments_fills_as_a_script_does(tmp_path: Path) -> None:
    path = tmp_path / "args.yaml"
    path.write_text(
        "per_device_train_batch_size: 2\ngradient_accumulation_steps: 4\nlearning_rate: 1.0e-4\nbf16: true\n"
        "max_steps: 100\nwarmup_steps: 10\n"
    )
    assert fields(translate(AUTO, "unishard", with_=path)).items() >= EXPECTED.items()
    path.write_text("training:\n  per_device_train_batch_size: 2\n  learning_rate: 1.0e-4\nmodel: {name: x}\n")
    assert fields(translate(AUTO, "unishard", with_=path))["optimizer.lr"] == 1e-4


def test_arguments_of_an_unknown_script_have_no_defaults() -> None:
    outcome = translate(
        AUTO,
        "unishard",
        with_="python train.py --learning_rate 1e-4 --weight_decay 0.1 --train_batch_size 3 --bf16",
    )
    found = fields(outcome)
    assert (found["optimizer.lr"], found["optimizer.weight_decay"], found["precision.reduce"]) == (1e-4, 0.1, "bf16")
    assert "optimizer.no_decay" not in found
    assert {
        "training.gradient_clipping",
        "optimizer.betas",
        "scheduler.total_steps",
    } <= outcome.reading.undecided.keys()
    assert outcome.supplied
    assert (outcome.supplied.tool, outcome.supplied.unknown) == ("", ("train_batch_size",))


@pytest.mark.parametrize("document", [FSDP, {"zero_optimization": {"stage": 2}}])
def test_the_length_of_an_unknown_schedule_is_said_and_not_used(document: dict[str, Any]) -> None:
    outcome = translate(document, "unishard", with_="python train.py --learning_rate 1e-4 --max_steps 9")
    assert not outcome.of(Fit.UNSUPPORTED)
    item = next(item for item in outcome.items if item.key == "max_steps")
    assert (item.fit, item.note) == (Fit.NEEDS_INPUT, "the training ends after 9 updates; do that in your loop")
    assert "scheduler.total_steps" not in outcome.reading.decided
    shaped = "python train.py --max_steps 9 --lr_scheduler_type cosine"
    assert fields(translate(document, "unishard", with_=shaped))["scheduler.total_steps"] == 9


def test_the_length_of_a_training_is_said_and_goes_along() -> None:
    document = {"zero_optimization": {"stage": 2}}
    outcome = with_command(document, change=("--max_steps 100", "--num_train_epochs 7"))
    assert next(item for item in outcome.items if item.key == "num_train_epochs").fit is Fit.NEEDS_INPUT
    outcome = with_command(document, "hf", change=("--max_steps 100", "--num_train_epochs 7"))
    assert outcome.document["num_train_epochs"] == 7


@pytest.mark.parametrize("own", ["--num_warmup_steps 3", "--zero_stage 3", "--lr_scheduler cosine", "--deepspeed"])
def test_a_script_with_a_loop_of_its_own_is_not_taken_for_the_trainer(own: str) -> None:
    outcome = with_command(AUTO, change=("--deepspeed ds.json", own))
    assert outcome.supplied
    assert not outcome.supplied.tool
    assert "training.gradient_clipping" in outcome.reading.undecided


def test_a_tool_around_the_trainer_has_its_own_defaults() -> None:
    command = "NPROC_PER_NODE=2 llamafactory-cli train --stage sft --finetuning_type lora --learning_rate 1e-4"
    outcome = translate(AUTO, "unishard", with_=command)
    assert outcome.supplied
    assert outcome.supplied.tool.startswith("LLaMA-Factory")
    assert fields(outcome)["launch.processes_per_node"] == 2


def test_the_command_line_takes_precedence_over_the_ranks_of_accelerates_file() -> None:
    assert with_command({**FSDP, "num_processes": 8}).reading.topology.world_size == 4
    assert with_command({**FSDP, "num_processes": 8}, topology=Topology(2, 2)).reading.topology == Topology(2, 2)
    outcome = with_command(
        {**FSDP, "num_processes": 8}, change=("deepspeed --num_gpus", "accelerate launch --num_processes")
    )
    assert not outcome.of(Fit.UNSUPPORTED)
    assert fields(outcome)["launch.processes_per_node"] == 4


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("x.json", json.dumps(AUTO), "is a config of DeepSpeed, for TrainingArguments that name no engine"),
        ("x.yaml", "a: 1\nb: 2\n", "matches no known format"),
    ],
)
def test_what_holds_no_arguments_is_an_error(tmp_path: Path, name: str, text: str, what: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=what):
        translate(AUTO, "unishard", with_=tmp_path / name)
    with pytest.raises(ConfigError, match=what):
        translate(AUTO, "unishard", with_=str(tmp_path / name))


def test_a_refused_file_has_a_command_that_works() -> None:
    found = remedy(open_source({**AUTO, "gradient_clipping": 0.5}), "unishard", with_=COMMAND)
    assert found
    assert found.drop == ("gradient_clipping",)
    found = remedy(open_source(ZERO), "unishard", with_=COMMAND)
    assert found
    assert found.drop == ("gradient_accumulation_steps",)


def test_an_optimizer_that_is_refused_is_not_replaced() -> None:
    document = {**AUTO, "optimizer": {"type": "OneBitAdam", "params": {"lr": "auto"}}}
    assert [item.key for item in with_command(document).of(Fit.UNSUPPORTED)] == ["optimizer.type"]


def test_a_warmup_ratio_counts_for_deepspeeds_schedule() -> None:
    document = {
        "per_device_train_batch_size": 1,
        "warmup_ratio": 0.1,
        "max_steps": 100,
        "deepspeed": {**AUTO, "train_batch_size": 1},
    }
    assert fields(translate(document, "unishard", from_="hf"))["scheduler.warmup_steps"] == 10


@pytest.mark.parametrize(
    ("save", "scheduler", "optimizer"),
    [
        (
            "--per_device_train_batch_size 2 --save_steps 10",
            "the scheduler of the DeepSpeed config counts",
            "the optimizer of the DeepSpeed config counts",
        ),
        ("", "unless the script passes its own", "unless the script passes its own"),
    ],
)
def test_what_deepspeeds_own_scheduler_and_optimizer_decide_is_said(save: str, scheduler: str, optimizer: str) -> None:
    outcome = translate(AUTO, "unishard", with_=f"deepspeed run.py --lr_scheduler_type cosine --optim sgd {save}")
    ignored = {item.key: item.note for item in outcome.of(Fit.IGNORED) if item.supplied}
    assert scheduler in ignored["lr_scheduler_type"]
    assert optimizer in ignored["optim"]
    assert (fields(outcome)["scheduler.name"], fields(outcome)["optimizer.name"]) == ("linear", "adamw")
    assert not outcome.of(Fit.UNSUPPORTED)


SECTION = "model: {name: m}\ntraining:\n  learning_rate: 1.0e-5\n  per_device_train_batch_size: 1\n  bf16: true\n"


def test_options_of_the_command_count_over_a_section_of_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "sect.yaml"
    recipe.write_text(SECTION)
    words = "--learning_rate 5e-5 --weight_decay 0.1 --per_device_train_batch_size 16 --max_steps 10"
    outcome = translate(recipe, "unishard", with_=f"torchrun --nproc-per-node 2 train.py --config {recipe} {words}")
    cfg = outcome.reading.config
    assert (cfg.optimizer.lr, cfg.optimizer.weight_decay, cfg.training.micro_batch_size) == (5e-5, 0.1, 16)
    assert (cfg.precision.compute, cfg.scheduler.total_steps) == ("bf16", 10)
    assert {item.note for item in outcome.items if item.key == "training.learning_rate"} == {"the command says 5e-05"}
    apart = translate(recipe, "unishard", with_=f"torchrun --nproc-per-node 2 train.py {words}")
    refused = [item for item in apart.of(Fit.UNSUPPORTED) if item.key == "learning_rate"]
    assert "sect.yaml:3" in refused[0].note


@pytest.mark.parametrize(("mixed", "engine", "master"), [("no", "FSDP", "bf16"), ("bf16", "FSDP", "fp32")])
def test_a_launcher_makes_fp32_masters_of_a_loaded_model_where_it_mixes_precisions(
    mixed: str, engine: str, master: str, tmp_path: Path
) -> None:
    recipe, launcher = tmp_path / "hf.yaml", tmp_path / "acc.yaml"
    recipe.write_text("model_name_or_path: m\ndtype: bfloat16\nper_device_train_batch_size: 1\nmax_steps: 10\n")
    launcher.write_text(f"distributed_type: {engine}\nmixed_precision: '{mixed}'\nfsdp_config: {{fsdp_version: 2}}\n")
    outcome = translate(recipe, "unishard", with_=launcher)
    assert not outcome.of(Fit.UNSUPPORTED)
    assert outcome.reading.config.precision.compute == "bf16"
    assert outcome.reading.config.precision.master == master
