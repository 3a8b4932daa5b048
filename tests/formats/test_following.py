"""A launch script's `--config_file` is followed: the config of Accelerate decides the strategy of a recipe that names
no engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from unishard.contract.rules import Fit
from unishard.formats import Outcome, translate
from unishard.formats.surveying import FoundConfig, survey

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
def test_the_launchers_file_decides_the_strategy(
    project: Path, script: str, name: str, backend: str, ranks: int
) -> None:
    outcome = launched(project, f"--config_file recipes/launch/{name}.yaml", script)
    config = outcome.reading.config
    assert (config.backend, config.sharding.strategy, config.training.micro_batch_size) == (backend, "full_shard", 2)
    assert outcome.launch == f"torchrun --nproc-per-node {ranks} train.py"
    assert not outcome.status(strict=False)
    places = {item.key: item.place for item in outcome.items if item.from_sidecar}
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


def test_a_launchers_file_that_is_not_there_is_refused_unless_the_strategy_is_said(project: Path) -> None:
    outcome = launched(project, "--config_file recipes/launch/absent.yaml")
    (item,) = outcome.of(Fit.UNSUPPORTED)
    assert item.key == "accelerate --config-file"
    assert "was not found" in item.note
    assert "--set backend=... --set sharding.strategy=..." in item.note
    assert item.place.endswith("run.sh:1")
    script, recipe = project / "scripts/run.sh", project / "recipes/sft/config.yaml"
    said = translate(recipe, "unishard", with_=script, overrides=["backend=deepspeed", "sharding.strategy=zero2"])
    assert (said.reading.config.sharding.strategy, said.status(strict=False)) == ("shard_grad_op", 0)
    assert not translate(recipe, "unishard", with_=script, drop=["accelerate --config-file"]).status(strict=False)
    recipe.write_text(RECIPE + "fsdp: full_shard\n")
    assert not translate(recipe, "unishard", with_=script).of(Fit.UNSUPPORTED)


def test_options_of_the_launch_line_count_more_than_the_file(project: Path) -> None:
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
    launched(project, f"--config_file recipes/launch/zero3.yaml --use_deepspeed {options}")
    file, script = project / "recipes/launch/zero3.yaml", project / "scripts/run.sh"
    outcome = translate(file, "unishard", with_=script, drop=["bf16"])
    assert not outcome.of(Fit.UNSUPPORTED)
    config = outcome.reading.config
    assert (config.sharding.strategy, config.offload.optimizer) == ("shard_grad_op", "cpu")
    assert (config.training.gradient_clipping, config.precision.compute) == (2.0, "fp16")
    (file_s, line_s) = [item for item in outcome.items if item.key == "deepspeed_config.zero_stage"]
    assert (file_s.value, file_s.note) == (3, f"{script}:1 says 2, which counts more")
    assert (line_s.value, line_s.place) == (2, f"{script}:1")
    same = translate(file, "accelerate", with_=script, drop=["bf16"])
    assert not same.of(Fit.UNSUPPORTED)
    assert same.document["deepspeed_config"]["zero_stage"] == 3
    notes = {item.key: item.note for item in same.items}
    assert "stays on the launch line" in notes["accelerate --zero-stage"]


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
    launched(project, f"--config_file {file} --deepspeed_config_file ../ds.json")
    assert not translate(file, "unishard", with_=project / "scripts/run.sh").of(Fit.UNSUPPORTED)


def test_the_command_line_counts_more_than_the_recipe_that_it_names(project: Path) -> None:
    outcome = launched(project, "--config_file recipes/launch/zero3.yaml", to="unishard")
    assert outcome.reading.config.optimizer.lr == 1e-4
    script = project / "scripts/run.sh"
    script.write_text(script.read_text().rstrip() + " --learning_rate 3e-4\n")
    outcome = translate(project / "recipes/sft/config.yaml", "unishard", with_=script)
    assert outcome.reading.config.optimizer.lr == 3e-4
    (file, line) = [item for item in outcome.items if item.key == "learning_rate"]
    assert file.note.endswith("run.sh:1 says 0.0003")
    assert line.place.endswith("run.sh:1")
    same = translate(project / "recipes/sft/config.yaml", "hf", from_="hf", with_=script)
    notes = {item.key: item.note for item in same.items if item.from_sidecar}
    assert "stays on the launch line" in notes["learning_rate"]
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
    (project / "scripts/run.sh").parent.mkdir()
    (project / "scripts/run.sh").write_text(
        f"deepspeed --num_gpus 2 run.py {named} --deepspeed ds.json --learning_rate 3e-4\n"
    )
    outcome = translate(project / "ds.json", "unishard", with_=project / "scripts/run.sh")
    config = outcome.reading.config
    assert (config.training.micro_batch_size, config.precision.compute, config.optimizer.lr) == (2, "bf16", 3e-4)
    places = {item.key: item.place for item in outcome.items}
    assert places["learning_rate"].endswith("run.sh:1")
    assert places["train_micro_batch_size_per_gpu"].endswith("config.yaml:1")


def test_the_engines_file_is_found_from_the_script_and_from_the_recipe(project: Path) -> None:
    (project / "engines").mkdir()
    (project / "engines/z2.json").write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}')
    line = "torchrun --nproc-per-node 2 run.py {}--config recipes/sft/config.yaml\n"
    script, recipe = project / "run.sh", project / "recipes/sft/config.yaml"
    script.write_text(line.format("--deepspeed engines/z2.json "))
    assert translate(recipe, "unishard", with_=script).reading.config.sharding.strategy == "shard_grad_op"
    recipe.write_text(RECIPE + "deepspeed: engines/z2.json\n")
    assert translate(recipe, "unishard").reading.config.sharding.strategy == "shard_grad_op"


def test_keys_of_the_launchers_file_can_be_dropped(project: Path) -> None:
    (project / "recipes/launch/zero3.yaml").write_text(
        ZERO + "  offload_param_device: nvme\n  offload_param_nvme_path: files\n"
    )
    launched(project, "--config_file recipes/launch/zero3.yaml")
    recipe, script = project / "recipes/sft/config.yaml", project / "scripts/run.sh"
    outcome = translate(recipe, "unishard", with_=script, drop=["deepspeed_config.offload_param_*"])
    assert (outcome.reading.config.offload.params, outcome.status(strict=False)) == ("none", 0)


def test_a_line_that_starts_another_recipe_is_said(project: Path) -> None:
    other = project / "recipes/dpo.yaml"
    other.write_text(RECIPE)
    launched(project, "--config_file recipes/launch/zero3.yaml")
    (item,) = translate(other, "unishard", with_=project / "scripts/run.sh").of(Fit.APPROXIMATE)
    assert (item.key, item.value) == ("--config", "recipes/sft/config.yaml")


README = """Train *every* model of the author's:

```python
print("don't")
```

```bash
# ZeRO-3
$ accelerate launch --config_file recipes/launch/{name}.yaml run.py --config recipes/{{task}}/config.yaml
```
"""


def test_migrate_takes_the_strategy_from_the_line_of_a_page(project: Path) -> None:
    (project / "README.md").write_text(README.format(name="zero3"))
    (project / "other").mkdir()
    (project / "other/recipe.yaml").write_text(RECIPE)
    found = {Path(one.path).name: one for one in survey(project, "unishard") if isinstance(one, FoundConfig)}
    recipe = found["config.yaml"]
    assert (recipe.backend, recipe.strategy, recipe.script) == ("deepspeed", "full_shard", str(project / "README.md"))
    assert (found["recipe.yaml"].backend, found["recipe.yaml"].strategy) == (
        "needs input",
        "needs input",
    )  # two launchers' files, no line
    (project / "recipes/launch/fsdp.yaml").unlink()
    found = {Path(one.path).name: one for one in survey(project, "unishard") if isinstance(one, FoundConfig)}
    assert found["recipe.yaml"].script == str(project / "recipes/launch/zero3.yaml")
