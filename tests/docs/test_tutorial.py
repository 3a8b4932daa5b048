"""docs/writing-a-backend.md: its files make an installable backend, which is listed, translates, trains and
conforms."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from fences import ROOT, blocks

PAGE = "docs/writing-a-backend.md"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """The page's files, installed beside everything else; the folder to put on the path."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for block in blocks("python", "toml"):
        first, _, _ = block.text.partition("\n")
        if block.page == PAGE:
            path = source / first.removeprefix("# ")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "--target",
        str(target),
        str(source),
    ]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return source, target


def run(project, *command):
    source, target = project
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(target), str(ROOT), str(ROOT / "backends")]),
        "COLUMNS": "140",
    }
    return subprocess.run(
        [sys.executable, *command], cwd=source, env=environ, capture_output=True, text=True, timeout=300
    )


def test_it_is_listed_beside_the_others(project):
    done = run(project, "-m", "unishard", "doctor")
    assert done.returncode == 0, done.stderr
    assert "plain" in done.stdout
    assert "deepspeed" in done.stdout


def test_what_it_cannot_do_is_refused_with_what_instead(project):
    source, _ = project
    (source / "config.yaml").write_text("backend: plain\nsharding: zero3\n", encoding="utf-8")
    done = run(project, "-c", "import unishard; unishard.translate(unishard.load('config.yaml')).check(strict=False)")
    assert (
        "sharding.strategy: 'full_shard' is not supported by plain: every rank holds the full model; write no_shard"
        in done.stderr
    )


MOVES = """
import torch, unishard

def prepared(backend, strategy):
    cfg = unishard.Config(backend=backend, sharding=strategy, optimizer={"lr": 0.1, "groups": [{"params": ["bias"], "lr": 0.2}]})
    return unishard.prepare(torch.nn.Linear(4, 3), cfg)

def update(engine):
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    return engine.step().grad_norm

with prepared("plain", "no_shard") as engine:
    update(engine)
    folder = engine.save("saved")
    expected = update(engine)
for backend, strategy in (("plain", "no_shard"), ("fsdp", "full_shard")):
    with prepared(backend, strategy) as engine:
        assert engine.load(folder, verify="bits").notes == ()
        assert abs(update(engine) - expected) < 1e-6 * expected
        engine.save(f"from-{backend}")
with prepared("plain", "no_shard") as engine:
    print("step", engine.load("from-fsdp", verify="bits").step)
"""


@pytest.mark.ranks
def test_a_run_moves_between_it_and_another_engine(project):
    done = run(project, "-c", MOVES)
    assert "step 2" in done.stdout, done.stderr


@pytest.mark.ranks
def test_it_conforms(project, deep):
    """Each model, and each number of ranks, is a group of cells that share processes."""
    some = [] if deep else ["-k", "mlp and 2ranks"]
    done = run(project, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_plain.py", *some)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
