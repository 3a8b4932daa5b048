"""The command that trains, and the files that it names: they decide the engine of a recipe that names none, which is
refused otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from unishard.contract.rules import Fit
from unishard.errors import ConfigError
from unishard.formats import Outcome, translate

RECIPE = (
    "per_device_train_batch_size: 2\nlearning_rate: 1.0e-4\nmax_steps: 100\nwarmup_steps: 10\nbf16: "
    "true\noutput_dir: out\n"
)
ZERO = """distributed_type: DEEPSPEED
mixed_precision: bf16
num_processes: 8
deepspeed_config:
  zero_stage: 3
"""
FSDP = "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 2\n"
LINE = "accelerate launch {} scripts/run_sft.py --config recipes/sft/config.yaml"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    files = {
        "recipes/sft/config.yaml": RECIPE,
        "recipes/launch/zero3.yaml": ZERO,
        "recipes/launch/fsdp.yaml": FSDP,
        "pyproject.toml": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def launched(project: Path, options: str, more: str = "", to: str = "unishard", **others: Any) -> Outcome:
    return translate(project / "recipes/sft/config.yaml", to, with_=f"{LINE.format(options)} {more}", **others)


@pytest.mark.parametrize("folder", [".", "scripts", "recipes/launch"])
@pytest.mark.parametrize(("name", "backend", "ranks"), [("zero3", "deepspeed", 8), ("fsdp", "fsdp", 2)])
def test_the_launchers_file_decides_the_strategy(
    project: Path, folder: str, name: str, backend: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / folder).mkdir(exist_ok=True)
    monkeypatch.chdir(project / folder)
    outcome = launched(project, f"--config_file recipes/launch/{name}.yaml")
    config = outcome.reading.config
    assert (config.backend, config.sharding.strategy, config.training.micro_batch_size) == (backend, "full_shard", 2)
    assert outcome.launch == f"torchrun --nproc-per-node {ranks} train.py"
    assert not outcome.status(strict=False)
    places = {item.key: item.place for item in outcome.items if item.supplied}
    assert places["distributed_type"].endswith(f"recipes/launch/{name}.yaml:1")


def test_so_does_one_that_is_named_itself(project: Path) -> None:
    outcome = translate(project / "recipes/sft/config.yaml", "unishard", with_=project / "recipes/launch/zero3.yaml")
    assert (outcome.reading.config.backend, outcome.reading.config.sharding.strategy) == ("deepspeed", "full_shard")
    assert outcome.supplied
    assert not outcome.supplied.unknown
    assert not outcome.status(strict=False)


def test_an_engine_that_the_recipe_names_stays(project: Path) -> None:
    (project / "recipes/sft/config.yaml").write_text(RECIPE + "fsdp: full_shard\n")
    outcome = launched(project, "--config_file recipes/launch/zero3.yaml")
    assert (outcome.reading.config.backend, outcome.reading.config.sharding.strategy) == ("fsdp", "full_shard")


def test_deepspeeds_own_file_decides_it_too(project: Path) -> None:
    (project / "ds.json").write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}')
    outcome = translate(project / "recipes/sft/config.yaml", "unishard", with_=project / "ds.json")
    config = outcome.reading.config
    assert (config.backend, config.sharding.strategy, config.precision.compute) == (
        "deepspeed",
        "shard_grad_op",
        "bf16",
    )
    assert not outcome.status(strict=False)


@pytest.mark.parametrize(
    "command", ["torchrun --nproc_per_node 2 run.py", "deepspeed run.py", "python -m torch.distributed.run run.py"]
)
def test_a_launcher_without_an_engine_means_plain_data_parallelism(project: Path, command: str) -> None:
    recipe = project / "recipes/sft/config.yaml"
    config = translate(recipe, "unishard", with_=f"{command} --config recipes/sft/config.yaml").reading.config
    assert (config.backend, config.sharding.strategy) == ("fsdp", "no_shard")


@pytest.mark.parametrize(
    ("more", "options"),
    [
        ("", {}),
        ("", {"with_": "accelerate launch --num_processes 2 run.py"}),
        ("", {"overrides": ["training.seed=1"]}),
        ("ddp_timeout: 3000\nddp_backend: nccl\nddp_find_unused_parameters: false\n", {}),
    ],
)
def test_a_recipe_without_an_engine_is_refused(project: Path, more: str, options: dict[str, Any]) -> None:
    recipe = project / "recipes/sft/config.yaml"
    recipe.write_text(RECIPE + more)
    with pytest.raises(ConfigError, match=r"does not say its engine.*--with zero3.yaml.*--with 'accel.*--set backend="):
        translate(recipe, "unishard", **options)


@pytest.mark.parametrize(
    ("more", "options", "strategy"),
    [
        ("fsdp: full_shard\n", {}, "full_shard"),
        ("", {"overrides": ["sharding.strategy=no_shard"]}, "no_shard"),
        ("", {"overrides": ["backend=deepspeed", "sharding=zero2"]}, "shard_grad_op"),
    ],
)
def test_what_decides_the_engine_is_enough(project: Path, more: str, options: dict[str, Any], strategy: str) -> None:
    recipe = project / "recipes/sft/config.yaml"
    recipe.write_text(RECIPE + more)
    outcome = translate(recipe, "unishard", **options)
    assert (outcome.reading.config.sharding.strategy, outcome.status(strict=False)) == (strategy, 0)


def test_between_tools_of_trainingarguments_the_engine_stays_the_launchers(project: Path) -> None:
    recipe = project / "recipes/sft/config.yaml"
    assert not translate(recipe, "hf").status(strict=False)
    assert "fsdp" not in translate(recipe, "trl").document


def test_a_launchers_file_that_is_not_there(project: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config_file names .*absent.yaml, which was not found"):
        launched(project, "--config_file recipes/launch/absent.yaml")


def test_options_of_the_command_count_more_than_the_file(project: Path) -> None:
    outcome = launched(project, "--config_file recipes/launch/zero3.yaml --num_processes 4")
    assert outcome.reading.config.launch.processes_per_node == 4
    assert outcome.launch == "torchrun --nproc-per-node 4 train.py"


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ("--use_deepspeed --zero_stage 3", ("deepspeed", "full_shard")),
        ("--use_deepspeed", ("deepspeed", "shard_grad_op")),
        ("--use_fsdp --fsdp_version 2", ("fsdp", "full_shard")),
        ("--config_file recipes/launch/zero3.yaml --zero_stage 1", ("deepspeed", "shard_optimizer")),
        ("--config_file recipes/launch/zero3.yaml --use_fsdp --fsdp-sharding-strategy NO_SHARD", ("fsdp", "no_shard")),
        ("--multi_gpu", ("fsdp", "no_shard")),
    ],
)
def test_options_of_the_launcher_decide_the_engine(project: Path, options: str, found: tuple[str, str]) -> None:
    outcome = launched(project, f"--num_processes 2 {options}")
    config = outcome.reading.config
    assert (config.backend, config.sharding.strategy) == found
    assert not outcome.status(strict=False)


def test_options_of_the_launcher_count_more_than_its_translated_file(project: Path) -> None:
    options = "--zero_stage 2 --gradient_clipping 2.0 --mixed_precision fp16 --offload_optimizer_device cpu"
    command = LINE.format(f"--config_file recipes/launch/zero3.yaml --use_deepspeed {options}")
    file = project / "recipes/launch/zero3.yaml"
    outcome = translate(file, "unishard", with_=command, drop=["bf16"])
    assert not outcome.of(Fit.UNSUPPORTED)
    config = outcome.reading.config
    assert (config.sharding.strategy, config.offload.optimizer) == ("shard_grad_op", "cpu")
    assert (config.training.gradient_clipping, config.precision.compute) == (2.0, "fp16")
    (file_s, line_s) = [item for item in outcome.items if item.key == "deepspeed_config.zero_stage"]
    assert (file_s.value, file_s.note) == (3, "the command says 2, which counts more")
    assert (line_s.value, line_s.place) == (2, "the command")
    same = translate(file, "accelerate", with_=command, drop=["bf16"])
    assert not same.of(Fit.UNSUPPORTED)
    assert same.document["deepspeed_config"]["zero_stage"] == 3
    notes = {item.key: item.note for item in same.items}
    assert "stays in the command" in notes["accelerate --zero-stage"]


def test_the_precision_of_a_recipe_counts_more_than_the_launcher_s(project: Path) -> None:
    file = project / "recipes/launch/no.yaml"
    file.write_text("distributed_type: FSDP\nmixed_precision: 'no'\nnum_processes: 2\nfsdp_config: {fsdp_version: 2}\n")
    outcome = launched(project, "--config_file recipes/launch/no.yaml", to="unishard")
    assert not outcome.of(Fit.UNSUPPORTED)
    assert outcome.reading.config.precision.compute == "bf16"
    (item,) = [item for item in outcome.items if item.key == "mixed_precision"]
    assert item.note.endswith("says bf16, which counts more")


def test_an_option_that_names_the_file_in_another_way_contradicts_nothing(project: Path) -> None:
    (project / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    file = project / "recipes/launch/file.yaml"
    file.write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n"
    )
    command = LINE.format(f"--config_file {file} --deepspeed_config_file ./ds.json")
    assert not translate(file, "unishard", with_=command).of(Fit.UNSUPPORTED)


def test_the_command_line_counts_more_than_the_recipe_that_it_names(project: Path) -> None:
    outcome = launched(project, "--config_file recipes/launch/zero3.yaml", to="unishard")
    assert outcome.reading.config.optimizer.lr == 1e-4
    outcome = launched(project, "--config_file recipes/launch/zero3.yaml", "--learning_rate 3e-4")
    assert outcome.reading.config.optimizer.lr == 3e-4
    (file, line) = [item for item in outcome.items if item.key == "learning_rate"]
    assert file.note == "the command says 0.0003"
    assert line.place == "the command"
    same = launched(project, "--config_file recipes/launch/zero3.yaml", "--learning_rate 3e-4", "hf", from_="hf")
    notes = {item.key: item.note for item in same.items if item.supplied}
    assert "stays in the command" in notes["learning_rate"]
    assert "stays the launcher's" in notes["accelerate launch"]
    assert not same.launch
    assert same.document["learning_rate"] == 1e-4


@pytest.mark.parametrize(
    "named", ["recipes/sft/config.yaml", "--config recipes/sft/config.yaml", "--config=recipes/sft/config.yaml"]
)
def test_the_recipe_fills_the_engines_config(project: Path, named: str) -> None:
    (project / "ds.json").write_text(
        '{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}}'
    )
    command = f"deepspeed --num_gpus 2 run.py {named} --deepspeed ds.json --learning_rate 3e-4"
    outcome = translate(project / "ds.json", "unishard", with_=command)
    config = outcome.reading.config
    assert (config.training.micro_batch_size, config.precision.compute, config.optimizer.lr) == (2, "bf16", 3e-4)
    places = {item.key: item.place for item in outcome.items}
    assert places["learning_rate"] == "the command"
    assert places["train_micro_batch_size_per_gpu"].endswith("config.yaml:1")


def test_the_engines_file_is_found_from_the_command_and_from_the_recipe(project: Path) -> None:
    (project / "engines").mkdir()
    (project / "engines/z2.json").write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}')
    command = "torchrun --nproc-per-node 2 run.py --deepspeed engines/z2.json --config recipes/sft/config.yaml"
    recipe = project / "recipes/sft/config.yaml"
    assert translate(recipe, "unishard", with_=command).reading.config.sharding.strategy == "shard_grad_op"
    recipe.write_text(RECIPE + "deepspeed: engines/z2.json\n")
    assert translate(recipe, "unishard").reading.config.sharding.strategy == "shard_grad_op"


def test_keys_of_the_launchers_file_can_be_dropped(project: Path) -> None:
    (project / "recipes/launch/zero3.yaml").write_text(
        ZERO + "  offload_param_device: nvme\n  offload_param_nvme_path: files\n"
    )
    outcome = launched(project, "--config_file recipes/launch/zero3.yaml", drop=["deepspeed_config.offload_param_*"])
    assert (outcome.reading.config.offload.params, outcome.status(strict=False)) == ("none", 0)


def test_a_command_that_starts_another_recipe_is_refused(project: Path) -> None:
    other = project / "recipes/dpo.yaml"
    other.write_text(RECIPE)
    with pytest.raises(ConfigError, match=r"starts the training with recipes/sft/config.yaml, not with .*dpo.yaml"):
        translate(other, "unishard", with_=LINE.format("--config_file recipes/launch/zero3.yaml"))
