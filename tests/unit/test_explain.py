from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from unishard import Config, Fit, Topology
from unishard.cli import app
from unishard.config import leaves
from unishard.config.loading import read
from unishard.contract.explain import ExplainedField, explain

TEXT = """\
sharding: full_shard
training:
  micro_batch_size: 4
  gradient_accumulation_steps: 2
native: {deepspeed: {steps_per_print: 10}}
"""


def rows(tmp_path: Path, *overrides: str, world_size: int = 1) -> dict[str, ExplainedField]:
    (tmp_path / "c.yaml").write_text(TEXT)
    cfg, origins = read(tmp_path / "c.yaml", overrides)
    return {row.path: row for row in explain(cfg, origins, Topology(world_size=world_size))}


def test_every_field_and_every_native_setting_is_explained(tmp_path: Path) -> None:
    found = rows(tmp_path)
    assert list(found) == [*(path for path, _ in leaves(Config)), "native.deepspeed.steps_per_print"]
    assert all(
        set(row.images) == {"deepspeed", "fsdp"} for path, row in found.items() if not path.startswith("native.")
    )


def test_where_each_value_came_from(tmp_path: Path) -> None:
    found = rows(tmp_path, "sharding.units=[A]", "training.seed=3", world_size=3)
    origins = {path: row.origin.replace(f"{tmp_path}/", "") for path, row in found.items()}
    assert origins["sharding.strategy"] == "c.yaml:1"
    assert origins["sharding.units"] == "override"
    assert origins["sharding.min_unit_params"] == "default"
    assert origins["training.micro_batch_size"] == "c.yaml:3"
    assert origins["training.seed"] == "override"
    assert origins["backend"] == "default"
    assert (found["training.global_batch_size"].value, origins["training.global_batch_size"]) == (
        24,
        "computed for 3 ranks",
    )
    assert origins["native.deepspeed.steps_per_print"] == "c.yaml:5"


def test_a_mapping_has_no_lines() -> None:
    cfg, origins = read({"training": {"seed": 3}})
    assert origins.describe(cfg, "training.seed") == "given"
    assert origins.describe(cfg, "training.last_window") == "default"


def test_what_it_becomes(tmp_path: Path) -> None:
    image = rows(tmp_path, world_size=2)["training.global_batch_size"].images["deepspeed"]
    assert (image.fit, image.native) == (Fit.EXACT, "train_batch_size = 16")


def test_command(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("sharding: zero2\n")
    result = CliRunner().invoke(app, ["explain", str(path), "--set", "training.seed=7", "--world-size", "2"])
    assert result.exit_code == 0
    lines = {line.split()[0]: line for line in reversed(result.stdout.splitlines()) if line}
    assert lines["field"].split() == ["field", "value", "from", "deepspeed", "fsdp"]
    assert lines["training.seed"].split()[:3] == ["training.seed", "7", "override"]
    assert lines["sharding.strategy"].split()[:3] == ["sharding.strategy", "shard_grad_op", f"{path}:1"]
    assert "zero_optimization.stage = 2" in lines["sharding.strategy"]
    assert "backend    field" in result.stdout, "what is not exact is explained below"
