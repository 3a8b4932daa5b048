"""Lightning's Trainer on both engines, against its own DDP."""

from __future__ import annotations

import sys
from functools import cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "ranks"))
from harness import in_turn

from unishard.testing import run_ranks
from unishard.testing.cells import BACKENDS

if find_spec("lightning") is None:
    pytest.skip("lightning is not installed", allow_module_level=True)

import lightning_programs as programs

pytestmark = pytest.mark.ranks

CELLS = [
    pytest.param(backend, sharding, marks=[pytest.mark.deep] * (turn in (1, 2)))
    for turn, (backend, sharding) in enumerate(product(BACKENDS, ("full_shard", "shard_grad_op")))
]


@cache
def plain():
    return run_ranks(2, programs.both, "plain", None)[0]


@pytest.mark.parametrize(("backend", "sharding"), CELLS)
def test_figures_are_those_of_ddp(backend, sharding):
    found, expected = run_ranks(2, programs.both, backend, sharding)[0], plain()
    assert len(expected["automatic"]["norms"]) == expected["automatic"]["steps"][0] == 10
    for case, figures in expected.items():
        for name, values in figures.items():
            assert found[case][name] == pytest.approx(values, rel=1e-6), f"{case}: {name}"


@in_turn
def test_figures_are_those_of_ddp_on_four_ranks(backend):
    expected = run_ranks(4, programs.automatic, "plain", None)[0]
    found = run_ranks(4, programs.automatic, backend, "full_shard")[0]
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-6, abs=1e-6), name


def test_fp16_is_the_same_on_both_engines_and_near_fp32():
    """Lightning itself trains in bf16 on a CPU where it was asked for fp16."""
    plain = run_ranks(2, programs.in_precision, "fsdp", "fp32")[0]
    static = {"compute": "fp16", "loss_scale": 256}
    fsdp, deepspeed = (run_ranks(2, programs.in_precision, backend, static)[0] for backend in BACKENDS)
    for name in ("losses", "norms", "val"):
        assert fsdp[name] != plain[name]
        assert fsdp[name] == pytest.approx(plain[name], rel=1e-2, abs=1e-2), name
        assert deepspeed[name] == pytest.approx(fsdp[name], rel=1e-3, abs=1e-3), name


@in_turn
def test_a_step_may_have_two_backwards_and_a_folder_two_trainers(backend, tmp_path):
    found, expected = (run_ranks(2, programs.continued, each, str(tmp_path / each))[0] for each in (backend, "plain"))
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Three epochs of DDP, with checkpoints."""
    return run_ranks(2, programs.checkpointed, "plain", None, str(tmp_path_factory.mktemp("plain")), 3)[0]


@pytest.mark.parametrize(("first", "second"), [BACKENDS, pytest.param(*BACKENDS[::-1], marks=pytest.mark.deep)])
def test_a_checkpoint_resumes_on_the_other_engine(first, second, whole, tmp_path):
    kept = tmp_path / "kept"
    begun = run_ranks(2, programs.checkpointed, first, "full_shard", str(kept), 2)[0]
    assert sorted(path.name for path in kept.iterdir()) == ["epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"]
    assert [path.name for path in (kept / "last.ckpt").glob("step-*")] == ["step-00000010"]
    assert Path(begun["best"]).name == Path(whole["best"]).name.replace("epoch=2", "epoch=1")
    last = str(kept / "last.ckpt")
    rest = run_ranks(2, programs.checkpointed, second, "shard_grad_op", str(tmp_path / "more"), 3, last)[0]
    assert len(rest["losses"]) == 9
    for name in ("losses", "norms"):
        assert begun[name] + rest[name] == pytest.approx(whole[name], rel=1e-6), name
    for name in ("val", "lr", "steps"):
        assert rest[name] == pytest.approx(whole[name], rel=1e-6), name


def test_checkpoints_are_read_without_fit(tmp_path):
    folder = str(tmp_path / "kept")
    begun = run_ranks(2, programs.checkpointed, "deepspeed", "full_shard", folder, 1)[0]
    validated, weights, native = run_ranks(2, programs.read, folder + "/last.ckpt", str(tmp_path / "native.ckpt"))[0]
    assert validated == pytest.approx(begun["val"], rel=1e-6)
    assert weights == pytest.approx(begun["val"], rel=1e-6)
    assert "a file of Lightning's own, whose optimizer's state engines cannot read" in native


REFUSED = {
    "two optimizers": "optimizer: 2 optimizers for one module; an engine has one, with parameter groups",
    "accumulation": "training.gradient_accumulation_steps is 4, accumulate_grad_batches 1; remove it",
    "clipping": "training.gradient_clipping is 0.5, gradient_clip_val 1.0; remove one of them",
    "by value": "gradient_clip_algorithm='value' has no equal on engines; remove it; engines clip by the norm",
    "precision": "precision: is 32-true in Lightning's words, but Lightning was given bf16-mixed; remove its argument "
    "and write `precision: bf16` in the config",
    "double": "but Lightning was given 64-true; remove its argument",
    "own backward": "OwnBackward.backward is not called: engines run the backward; remove it",
    "average": "the callback StochasticWeightAveraging does not know engines; remove it, and average with",
    "fit again": "Regression was trained by fit already; build a new one, and pass ckpt_path to continue",
    "compiled": "training_step is replaced, as by torch.compile(module); write `compile: per_block` instead",
    "devices": "devices=3, num_nodes=1 are 3 ranks, but the launcher has started 1; set them to what it starts",
    "resume": "checkpoint.on_existing: resume would not reach Lightning's loops; remove it, and pass ckpt_path",
    "odd": "AdamW.zero_grad() was called after 1 of 2 backward calls of the accumulation window, and would drop",
    "remote": "checkpoints are directories of a file system that all ranks share",
    "of a loop": "engine.save has written this checkpoint, without Lightning's loops",
    "of DDP": "find_unused_parameters would be for DDP; remove it, and write in the config what it means, such as",
    "plugin": "engines write checkpoints themselves; remove the plugin of CheckpointIO",
    "no fit": "the engine is there once fit has begun",
}


@cache
def refusals(folder):
    return run_ranks(1, programs.refusals, folder)[0]


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "refusals"
    folder.mkdir(exist_ok=True)
    assert REFUSED[case] in refusals(str(folder))[case]


def test_bf16_is_said_in_the_words_of_either():
    assert run_ranks(1, programs.agreed)[0] == ["bf16-mixed"] * 2


@pytest.mark.parametrize("backend", ["fsdp", pytest.param("deepspeed", marks=pytest.mark.deep)])
def test_lightnings_own_launcher_starts_the_ranks(backend, tmp_path):
    done = programs.launched(tmp_path, backend)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split()[-1] == "2", done.stdout
