"""A launch script's `--config_file` is followed: the config of Accelerate decides the strategy of a recipe that names no engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from unishard.formats import Outcome, translate
from unishard.mapping.rules import Fit

RECIPE = "per_device_train_batch_size: 2\nlearning_rate: 1.0e-4\nmax_steps: 100\nwarmup_steps: 10\nbf16: true\noutput_dir: out\n"
ZERO = """distributed_type: DEEPSPEED
mixed_precision: bf16
num_processes: 8
deepspeed_config:
  zero_stage: 3
"""
FSDP = "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 2\n"
LINE = "accelerate launch {} scripts/run_sft.py --config recipes/sft/config.yaml\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
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


def launched(project: Path, options: str, script: str = "scripts/run.sh", to: str = "unishard") -> Outcome:
    path = project / script
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(LINE.format(options))
    return translate(project / "recipes/sft/config.yaml", to, with_=path)


@pytest.mark.parametrize("script", ["run.sh", "scripts/run.sh", "scripts/deep/run.sh"])
@pytest.mark.parametrize(("name", "backend", "ranks"), [("zero3", "deepspeed", 8), ("fsdp", "fsdp", 2)])
def test_the_launchers_file_decides_the_strategy(project: Path, script: str, name: str, backend: str, ranks: int) -> None:
    outcome = launched(project, f"--config_file recipes/launch/{name}.yaml", script)
    config = outcome.reading.config
    assert (config.backend, config.sharding.strategy, config.training.micro_batch_size) == (backend, "full_shard", 2)
    assert outcome.launch == f"torchrun --nproc-per-node {ranks} train.py"
    assert not outcome.status(strict=False)
    places = {item.key: item.place for item in outcome.items if item.beside}
    assert places["distributed_type"].endswith(f"recipes/launch/{name}.yaml:1")


def test_so_does_one_that_is_named_itself(project: Path) -> None:
    outcome = translate(project / "recipes/sft/config.yaml", "unishard", with_=project / "recipes/launch/zero3.yaml")
    assert (outcome.reading.config.backend, outcome.reading.config.sharding.strategy) == ("deepspeed", "full_shard")
    assert outcome.filling
    assert not outcome.filling.unknown
    assert not outcome.status(strict=False)


def test_an_engine_that_the_recipe_names_stays(project: Path) -> None:
    (project / "recipes/sft/config.yaml").write_text(RECIPE + "fsdp: full_shard\n")
    outcome = launched(project, "--config_file recipes/launch/zero3.yaml")
    assert (outcome.reading.config.backend, outcome.reading.config.sharding.strategy) == ("fsdp", "full_shard")


def test_a_file_that_is_not_there_is_said(project: Path) -> None:
    outcome = launched(project, "--config_file recipes/launch/absent.yaml")
    (item,) = [item for item in outcome.of(Fit.APPROXIMATE) if item.key == "accelerate --config-file"]
    assert "was not found" in item.note
    assert item.place.endswith("run.sh:1")


def test_options_of_the_launch_line_count_more_than_the_file(project: Path) -> None:
    outcome = launched(project, "--config_file recipes/launch/zero3.yaml --num_processes 4")
    assert outcome.reading.config.launch.processes_per_node == 4
    assert outcome.launch == "torchrun --nproc-per-node 4 train.py"
