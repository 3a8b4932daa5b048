"""`unishard migrate --script`: the moved loops have the losses of the scripts that they were."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from unishard.config.topology import Topology
from unishard.failures.lifetime import ensure
from unishard.testing import run_ranks
from unishard.testing.cells import BACKENDS
from unishard.tools.migrate.rewriting import diff_of, migrated

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.py"))


def unishard_migrate(*words, cwd, **environ):
    return subprocess.run(
        [sys.executable, "-m", "unishard", "migrate", *words],
        cwd=cwd, env=os.environ | environ, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def losses_of(source):
    import unishard

    if "import deepspeed" in source:
        from unishard_deepspeed.start import load

        load(ensure(Topology.from_environment()))  # DeepSpeed alone would first compile for half a minute
    names = {"__name__": "__main__"}
    exec(compile(source, "script", "exec"), names)
    unishard.shutdown()
    return names["losses"]


@pytest.mark.ranks
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_moved_loop_has_the_losses_of_the_script(script, tmp_path):
    ranks = 1 if script.stem == "ddp" else 2
    (tmp_path / "train.py").write_text(script.read_text())
    done = unishard_migrate("--script", "train.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "train.py").read_text() == script.read_text()
    subprocess.run(["patch", "-p0"], cwd=tmp_path, input=done.stdout, text=True, check=True, capture_output=True)
    moved = (tmp_path / "train.py").read_text()
    (backend,) = re.findall('"backend": "(.*)"', moved)
    expected = run_ranks(ranks, losses_of, script.read_text())[0]
    assert len(expected) > 3
    for other in BACKENDS:
        got = run_ranks(ranks, losses_of, moved.replace(f'"backend": "{backend}"', f'"backend": "{other}"'))[0]
        assert got == pytest.approx(expected, rel=1e-5)


def test_the_script_is_changed_only_where_it_is_asked_for(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPTS[0].read_text())
    done = unishard_migrate("--script", "train.py", "--write", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert script.read_text() == migrated(SCRIPTS[0].read_text(), script) != SCRIPTS[0].read_text()


REFUSED = {
    "print('x')\n": "train.py: has no call that shards the model of DistributedDataParallel, fully_shard",
    "model = DDP(net)\n": "train.py: has no call that shards the model",
    "from torch.nn.parallel import DistributedDataParallel as DDP\nmodel = DDP(net)\n": "has no training loop with",
    "for x in\n": "train.py:1: is not Python; name a training script",
}


@pytest.mark.parametrize("source", REFUSED)
def test_what_has_no_loop_to_move_is_one_error(source, tmp_path):
    (tmp_path / "train.py").write_text(source)
    done = unishard_migrate("--script", "train.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert REFUSED[source] in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_without_libcst_it_says_what_to_install(tmp_path):
    (tmp_path / "libcst.py").write_text("raise ModuleNotFoundError('No module named libcst', name='libcst')")
    (tmp_path / "train.py").write_text(SCRIPTS[0].read_text())
    done = unishard_migrate(
        "--script",
        "train.py",
        cwd=tmp_path,
        PYTHONPATH=f"{tmp_path}:{os.environ['PYTHONPATH']}" if "PYTHONPATH" in os.environ else str(tmp_path),
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "--script needs libcst, which is not installed; pip install 'unishard[migrate]'" in done.stderr


HEAD = """
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
LOOPS = {
    "a loss divided where it is used": (
        "for index, x in enumerate(loader):\n    (model(x).mean() / n).backward()\n"
        "    if (index + 1) % n == 0:\n        optimizer.step()\n        optimizer.zero_grad()\n",
        ["model.backward(model(x).mean())\n", "    model.step()\n", "# unishard: the last window of an epoch may be short"],
    ),
    "autocast and a scaler": (
        "scaler = torch.amp.GradScaler()\nfor x in tqdm(loader):\n    with torch.autocast('cuda', dtype=torch.float16):\n"
        "        loss = model(x).mean()\n    scaler.scale(loss).backward()\n    scaler.unscale_(optimizer)\n"
        "    scaler.step(optimizer)\n    scaler.update()\n",
        ['"precision": "fp16"', "for x in tqdm(model.batches(loader)):\n    loss = model(x).mean()\n    model.backward(loss)\n    model.step()\n"],
    ),
    "a value that is not known there": (
        "def run(model, limit):\n    for x in loader:\n        model(x).mean().backward()\n"
        "        torch.nn.utils.clip_grad_norm_(model.parameters(), limit)\n        optimizer.step()\n",
        ["# unishard: set training.gradient_clipping in cfg to limit, which is not known here\ncfg = unishard.load("],
    ),
    "an else of the boundary": (
        "for index, x in enumerate(loader):\n    model(x).mean().backward()\n"
        "    if (index + 1) % n == 0:\n        optimizer.step()\n    else:\n        count += 1\n",
        ["    # unishard: call model.step() for every micro-batch; `updated` ends a window"],
    ),
    "FSDP's own SHARD_GRAD_OP": (
        "model = FullyShardedDataParallel(model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)\n"
        "for x in loader:\n    model(x).mean().backward()\n    optimizer.step()\n",
        ['"sharding": {"strategy": "full_shard", "reshard_after_forward": False}'],
    ),
    "no loader": (
        "for index in range(3):\n    model(x).mean().backward()\n    optimizer.step()\n",
        ["# unishard: read the batches from engine.batches(loader): it ends the windows\nfor index in range(3):"],
    ),
    "names that the engine does not have": (
        "for x in loader:\n    model(x).mean().backward()\n    optimizer.step()\nmodel.load_state_dict(torch.load(path))\n",
        ["# unishard: load_state_dict: engine.load_weights(weights) replaces the weights"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LOOPS)
def test_loops_and_what_cannot_be_told(case):
    loop, expected = LOOPS[case]
    moved = migrated(HEAD + "n = 2\n" + loop, Path("train.py"))
    compile(moved, "train.py", "exec")
    for part in expected:
        assert part in moved
    assert diff_of(HEAD, HEAD, Path("train.py")) == ""
