"""What DeepSpeed stores in pieces comes out whole, and what is not understood is refused without running it."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from deepspeed_files import lay_out
from hypothesis import given, settings
from hypothesis import strategies as st

from unishard.checkpoint import manifest
from unishard.checkpoint.convert import convert
from unishard.checkpoint.tensor_reader import Tensors
from unishard.errors import CheckpointError

SMALL = [{"a.weight": (3, 5), "a.scale": ()}, {"b": (7,)}]
SHAPE = st.lists(st.integers(1, 5), max_size=3).map(tuple)
NAMES = ("a.weight", "a.bias", "b", "c.0.weight", "d")


def check(folder, tensors):
    found = Tensors(folder)
    for (name, key), value in tensors.items():
        own = f"model.{name}" if key == "fp32" else f"optim.state.{name}.{key}"
        assert found.shapes[own] == value.shape
        assert torch.equal(found.full(own), value), own


@settings(max_examples=30, deadline=None)
@given(
    stage=st.sampled_from([1, 2, 3]),
    ranks=st.integers(1, 5),
    shapes=st.lists(SHAPE, min_size=1, max_size=len(NAMES)),
    cut=st.integers(0, len(NAMES)),
)
def test_every_partition_comes_out_whole(stage, ranks, shapes, cut):
    named = dict(zip(NAMES, shapes, strict=False))
    groups = [dict(list(named.items())[:cut]), dict(list(named.items())[cut:])]
    groups = [group for group in groups if group]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        frozen = {"still": torch.arange(7.0, dtype=torch.bfloat16)}
        tensors = lay_out(root / "theirs", groups, stage=stage, ranks=ranks, frozen=frozen)
        convert(root / "theirs", root / "ours")
        check(root / "ours", tensors)
        found, facts = Tensors(root / "ours"), manifest.read(root / "ours")
        assert torch.equal(found.full("model.still"), frozen["still"])
        assert torch.equal(found.full("model.steps"), torch.tensor([5]))
        assert (facts.frozen, facts.buffers, facts.world_size) == (["still"], ["steps"], ranks)
        assert [group.names for group in facts.optimizer.groups] == [list(group) for group in groups]
        assert (facts.step, facts.schedule.updates) == (7, 5)


def test_needs_no_deepspeed(tmp_path, monkeypatch):
    tensors = lay_out(tmp_path / "theirs", SMALL)
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        monkeypatch.setitem(sys.modules, name, None)
    convert(tmp_path / "theirs", tmp_path / "ours")
    check(tmp_path / "ours", tensors)


@pytest.mark.parametrize("given_", [".", "global_step7"])
@pytest.mark.parametrize("latest", ["kept", "gone", "stale"])
def test_finds_the_files(tmp_path, given_, latest):
    tensors = lay_out(tmp_path / "theirs", SMALL)
    if latest == "gone":
        (tmp_path / "theirs" / "latest").unlink()
    if latest == "stale" and given_ == ".":
        (tmp_path / "theirs" / "latest").write_text("global_step9")
        with pytest.raises(CheckpointError, match="not a checkpoint in a known format"):
            convert(tmp_path / "theirs", tmp_path / "ours")
        return
    convert(tmp_path / "theirs" / given_, tmp_path / "ours")
    check(tmp_path / "ours", tensors)


def test_an_int_is_a_step_count_too(tmp_path):
    lay_out(tmp_path / "theirs", SMALL, step=5)
    convert(tmp_path / "theirs", tmp_path / "ours")
    count = Tensors(tmp_path / "ours").full("optim.state.b.step")
    assert (count.item(), count.dtype, count.shape) == (5.0, torch.float32, ())


@pytest.mark.parametrize(("iteration", "overflow", "made"), [(5, -1, 4), (1, -1, 0), (5, 4, 0), (5, 2, 1)])
def test_keeps_a_loss_scale(tmp_path, iteration, overflow, made):
    scaler = {"cur_scale": 512.0, "cur_iter": iteration, "last_overflow_iter": overflow, "scale_window": 100}
    lay_out(tmp_path / "theirs", SMALL, scaler=scaler)
    convert(tmp_path / "theirs", tmp_path / "ours")
    facts = manifest.read(tmp_path / "ours").loss_scale
    assert (facts.value, facts.made) == (512.0, made)


def test_says_what_is_left_behind(tmp_path):
    lay_out(tmp_path / "theirs", SMALL, lr_scheduler={"last_batch_iteration": 6}, epoch=3)
    notes = convert(tmp_path / "theirs", tmp_path / "ours")
    assert any("scheduler" in note for note in notes)
    assert any(note.startswith("not converted: epoch, saved by the script") for note in notes)


def test_takes_one_number_out_of_a_tensor_and_says_what_else_it_drops(tmp_path):
    lay_out(tmp_path / "theirs", SMALL, options={"lr": torch.tensor(0.5), "odd": torch.ones(2)})
    notes = convert(tmp_path / "theirs", tmp_path / "ours")
    assert all(
        "odd" not in group.options and group.options["lr"] == 0.5
        for group in manifest.read(tmp_path / "ours").optimizer.groups
    )
    assert any(note.startswith("not converted: odd, which are neither") for note in notes)


class Bomb:
    """Makes a folder where it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("pattern", ["*_model_states.pt", "*_rank_1_*_optim_states.pt"])
def test_runs_nothing(tmp_path, pattern):
    lay_out(tmp_path / "theirs", SMALL)
    (file,) = (tmp_path / "theirs" / "global_step7").glob(pattern)
    held = torch.load(file, weights_only=False)
    torch.save(held | {"more": Bomb(tmp_path / "bang")}, file)
    with pytest.raises(CheckpointError, match=r"mkdir, which is not loaded for safety"):
        convert(tmp_path / "theirs", tmp_path / "ours")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]


def _add(name):
    return lambda folder: (folder / name).touch()


def _remove(name):
    return lambda folder: (folder / name).unlink()


def _remove_all(folder):
    for file in folder.glob("*_optim_states.pt"):
        file.unlink()


def _damage(folder):
    (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").write_bytes(b"nothing of the kind")


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (_add("layer_0_expert_1_mp_rank_00_model_states.pt"), "experts"),
        (_add("layer_01-model_00-model_states.pt"), "pipeline"),
        (_add("mp_rank_01_model_states.pt"), "tensor and pipeline parallel"),
        (_add("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"), "rank 0 has a second file"),
        (lambda folder: (folder / "offloaded_tensors").mkdir(), "NVMe"),
        (_remove("zero_pp_rank_0_mp_rank_00_optim_states.pt"), "of rank 0 is missing"),
        (_remove_all, "the files \\*_optim_states.pt are missing"),
        (_remove("zero_pp_rank_1_mp_rank_00_optim_states.pt"), "2 ranks wrote it, but there are files of 1"),
        (_damage, "is damaged"),
    ],
)
def test_refuses_what_it_does_not_understand(tmp_path, harm, says):
    lay_out(tmp_path / "theirs", SMALL)
    harm(tmp_path / "theirs" / "global_step7")
    with pytest.raises(CheckpointError, match=says) as refused:
        convert(tmp_path / "theirs", tmp_path / "ours")
    assert str(tmp_path / "theirs") in str(refused.value)
    assert not (tmp_path / "ours").exists()


def test_refuses_a_model_parallel_one(tmp_path):
    lay_out(tmp_path / "theirs", SMALL, mp_world_size=2)
    with pytest.raises(CheckpointError, match="tensor and pipeline parallel"):
        convert(tmp_path / "theirs", tmp_path / "ours")


def test_refuses_partitions_that_do_not_fit(tmp_path):
    lay_out(tmp_path / "theirs", SMALL, stage=3)
    lay_out(tmp_path / "other", [{"a.weight": (3, 4), "a.scale": ()}, {"b": (7,)}], stage=3)
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    (tmp_path / "other" / "global_step7" / name).replace(tmp_path / "theirs" / "global_step7" / name)
    with pytest.raises(CheckpointError, match="do not have the size of a checkpoint by 2 ranks"):
        convert(tmp_path / "theirs", tmp_path / "ours")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_refuses_files_of_different_updates(tmp_path, stage):
    lay_out(tmp_path / "theirs", SMALL, stage=stage)
    lay_out(tmp_path / "older", SMALL, stage=stage, step=4)
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    (tmp_path / "older" / "global_step7" / name).replace(tmp_path / "theirs" / "global_step7" / name)
    with pytest.raises(CheckpointError, match=r"different steps \(5 and 4\)"):
        convert(tmp_path / "theirs", tmp_path / "ours")
