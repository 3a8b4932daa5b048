"""A wheel, installed where nothing of the checkout can be seen; test_contents.py builds the same one from the sdist, to
the byte."""

from __future__ import annotations

from pathlib import Path

import pytest

SCRIPT = """
import sys

import torch

import unishard
from unishard.testing import run_ranks


def step(backend):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    cfg = unishard.Config.model_validate({"backend": backend, "sharding": "full_shard"})
    with unishard.prepare(model, cfg) as engine:
        engine.backward(engine(torch.ones(4, 8)).square().mean())
        done = engine.step()
        return type(engine._adapter).__module__.partition(".")[0], done.updated, done.grad_norm


if __name__ == "__main__":
    first, second = run_ranks(2, step, sys.argv[1])
    print(*first[:2], first == second)
"""


@pytest.fixture
def core(install, wheel):
    """Unishard with its core dependencies only."""
    return install(wheel)


@pytest.fixture
def config(core):
    path = core.folder / "config.yaml"
    path.write_text("backend: fsdp\nsharding: full_shard\noptimizer: {lr: 2e-3}\n", encoding="utf-8")
    return path


def test_it_is_really_alone(core):
    found = core.output("python", "-c", "import unishard; print(unishard.__file__)").strip()
    assert Path(found).is_relative_to(core.root)
    engines = core.output(
        "python", "-c", "from importlib.util import find_spec as find; print(find('torch'), find('deepspeed'))"
    )
    assert engines.split() == ["None", "None"]


def test_both_backends_are_found(core):
    listed = core.run("unishard", "doctor").stdout  # it fails, since no engine is installed
    assert "backend fsdp: cannot train: its packages are not installed" in listed
    assert "backend deepspeed: cannot train: its packages are not installed" in listed


@pytest.mark.parametrize("to", ["unishard", "deepspeed", "accelerate", "hf"])
def test_every_format_is_there_and_needs_no_engine(core, to):
    path = core.folder / "ds.json"
    path.write_text(
        '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}, "train_micro_batch_size_per_gpu": 4}',
        encoding="utf-8",
    )
    engine = "deepspeed" if to in ("deepspeed", "unishard") else "fsdp"
    assert core.output("unishard", "translate", path, "--to", to, "--set", f"backend={engine}", "--report", "none")


def test_translation_needs_no_engine(core, config):
    assert "fully_shard" in core.output("unishard", "explain", config, "fsdp", "--native")
    assert '"stage": 3' in core.output("unishard", "explain", config, "deepspeed", "--native")
    assert '"stage": 3' in core.output("unishard", "translate", config, "--to", "deepspeed")


def test_training_says_what_to_install(core):
    failed = core.run("python", "-c", "import unishard; unishard.prepare(None, unishard.Config())")
    assert failed.stderr.strip().endswith("unishard.prepare needs torch, which is not installed; pip install torch")


def test_the_engine_that_is_not_there_is_named_with_its_extra(install, wheel):
    torch_only = install(wheel, "torch")
    failed = torch_only.run(
        "python",
        "-c",
        "import torch, unishard; unishard.prepare(torch.nn.Linear(1, 1), unishard.Config.model_validate({'backend': "
        "'deepspeed'}))",
    )
    assert failed.stderr.strip().endswith("; pip install 'unishard[deepspeed]'")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("backend", "extra"), [("fsdp", "torch"), pytest.param("deepspeed", "deepspeed", marks=pytest.mark.deep)]
)
def test_two_ranks_take_a_step_with_nothing_but_the_extra(install, wheel, backend, extra):
    environment = install(wheel, extra)
    script = environment.folder / "step.py"
    script.write_text(SCRIPT, encoding="utf-8")
    assert environment.output("python", script, backend).split()[-3:] == [f"unishard_{backend}", "True", "True"]
