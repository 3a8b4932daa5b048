"""A conversion is whole or has not been, says what it refuses, and is what stock torch reads."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from deepspeed_files import lay_out
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from unishard.checkpoint import manifest
from unishard.checkpoint.convert import convert, formats
from unishard.checkpoint.hashing import hash_of, hexadecimal
from unishard.checkpoint.tensor_reader import Tensors
from unishard.errors import CheckpointError

GROUPS = [{"a.weight": (3, 5), "a.scale": ()}, {"0.bias": (7,)}]


@pytest.fixture
def theirs(tmp_path):
    lay_out(tmp_path / "theirs", GROUPS, frozen={"still": torch.ones(2, 3)})
    return tmp_path / "theirs"


@pytest.fixture
def ours(theirs, tmp_path):
    convert(theirs, tmp_path / "ours")
    return tmp_path / "ours"


def dcp_saved(folder, state):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def test_the_manifest_says_what_was_written(ours):
    facts, tensors = manifest.read(ours), Tensors(ours)
    assert set(facts.tensors) == set(tensors)
    for name, each in facts.tensors.items():
        assert each.hash == hexadecimal(hash_of(tensors.full(name).reshape(-1)))
    assert {name: each.bytes for name, each in facts.files.items()} == {
        path.name: path.stat().st_size for path in ours.iterdir() if path.name != manifest.FILE
    }
    assert facts.model.numel == 15 + 1 + 7 + 6
    own = {name.removeprefix("model."): each.shape for name, each in facts.tensors.items() if name.startswith("model.")}
    assert facts.model.fingerprint == manifest.fingerprint_of(own)  # as engines do


def while_writing(source, error):
    """Progress that ends in an error once the source has been verified, which comes first."""
    left = sum(path.stat().st_size for path in source.rglob("*.pt"))

    def advance(count):
        nonlocal left
        left -= count
        if left < 0:
            raise error

    return lambda total: advance


@pytest.mark.parametrize("to", ["unishard", "dcp", "deepspeed-universal"])
def test_what_is_broken_off_leaves_nothing(theirs, tmp_path, to):
    with pytest.raises(KeyboardInterrupt):
        convert(theirs, tmp_path / "new", to=to, progress=while_writing(theirs, KeyboardInterrupt()))
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


@pytest.mark.parametrize("to", ["unishard", "dcp", "deepspeed-universal"])
def test_progress_ends_at_the_total(theirs, tmp_path, to):
    totals, done = [], []

    def progress(total):
        totals.append(total)
        return done.append

    convert(theirs, tmp_path / "new", to=to, progress=progress)
    assert totals == [sum(done)]


@pytest.mark.parametrize("to", ["unishard", "dcp", "deepspeed-universal"])
def test_a_full_disk_leaves_nothing(theirs, tmp_path, to):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(CheckpointError, match="No space left on device"):
        convert(theirs, tmp_path / "new", to=to, progress=while_writing(theirs, full))
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


class TestDamage:
    """A flipped bit is refused, or it is one that no reader sees: then the copy is as good as that of the original."""

    FLIPS = 12

    def check(self, source, tmp_path, files, to="unishard"):
        assert files
        convert(source, tmp_path / "right", to=to)
        right = self.contents(tmp_path / "right", to)
        refused = 0
        for path in files:
            data = path.read_bytes()
            for flip in range(self.FLIPS):
                at = (2 * flip + 1) * len(data) // (2 * self.FLIPS)
                path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
                folder = tmp_path / f"{path.name}-{flip}"
                told = self.told(source, folder, to)
                refused += bool(told)
                if told:
                    assert str(source) in told
                    assert not folder.exists()
                else:
                    assert self.contents(folder, to) == right, f"byte {at} of {path}"
            path.write_bytes(data)
        return refused

    def told(self, source, folder, to):
        try:
            convert(source, folder, to=to)
        except CheckpointError as error:
            return str(error)
        return ""

    def contents(self, folder, to):
        if to == "unishard":
            return manifest.read(folder).tensors
        return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    @pytest.mark.parametrize("to", ["unishard", "deepspeed-universal"])
    def test_of_a_checkpoint_of_ours(self, ours, tmp_path, to):
        big = self.grown(ours, tmp_path)
        assert self.check(big, tmp_path, [big / "__0_0.distcp", big / ".metadata"], to) > self.FLIPS

    def test_of_one_that_plain_torch_wrote(self, ours, tmp_path):
        state = {
            "model": {"a.weight": torch.randn(100, 40)},
            "optim": {"state": {"a.weight": {"exp_avg": torch.randn(100, 40)}}},
        }
        source = dcp_saved(tmp_path / "dcp", state)
        assert self.check(source, tmp_path, [*source.glob("*.distcp")]) > self.FLIPS / 2

    @pytest.mark.parametrize("stage", [2, 3])
    def test_of_one_of_deepspeed(self, tmp_path, stage):
        lay_out(tmp_path / "large", [{"a.weight": (100, 40)}], stage=stage)
        files = [*(tmp_path / "large").rglob("*.pt")]
        assert self.check(tmp_path / "large", tmp_path, files) > self.FLIPS * len(files) / 2

    def grown(self, ours, tmp_path):
        """With tensors that are larger than what surrounds them in the file."""
        lay_out(tmp_path / "large", [{"a.weight": (100, 40)}])
        convert(tmp_path / "large", tmp_path / "grown")
        return tmp_path / "grown"


def test_nothing_that_exists_is_written_to(theirs, tmp_path):
    (tmp_path / "new").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="already exists"):
        convert(theirs, tmp_path / "new")


def test_a_universal_checkpoint_is_not_read(ours, tmp_path):
    convert(ours, tmp_path / "universal", to="deepspeed-universal")
    with pytest.raises(CheckpointError, match="can be written, but not read"):
        convert(tmp_path / "universal", tmp_path / "new")


def test_takes_the_latest_of_a_folder_of_checkpoints(ours, tmp_path):
    (tmp_path / "run").mkdir()
    ours.rename(tmp_path / "run" / "step-00000007")
    (tmp_path / "run" / "latest").write_text("step-00000007\n")
    convert(tmp_path / "run", tmp_path / "dcp", to="dcp")
    assert "model.a.weight" in Tensors(tmp_path / "dcp")


def test_every_form_has_a_use():
    assert all(each.read is not None or each.write is not None for each in formats().values())


class TestPlainTorch:
    def test_takes_it_apart(self, ours, tmp_path):
        convert(ours, tmp_path / "dcp", to="dcp")
        dcp_to_torch_save(tmp_path / "dcp", tmp_path / "all.pt")
        found, tensors = torch.load(tmp_path / "all.pt", weights_only=False), Tensors(ours)
        assert torch.equal(found["model"]["a.weight"], tensors.full("model.a.weight"))
        assert torch.equal(found["optim"]["state"]["a.scale"]["exp_avg"], tensors.full("optim.state.a.scale.exp_avg"))
        assert [group["params"] for group in found["optim"]["param_groups"]] == [list(group) for group in GROUPS]

    @pytest.mark.parametrize("root", ["", "app."])
    def test_there_and_back(self, ours, tmp_path, root):
        tensors, groups = (
            Tensors(ours),
            [
                {"lr": torch.tensor(0.5), "betas": (0.9, 0.99), "params": ["a.weight", "a.scale"]},
                {"lr": 0.2, "params": ["0.bias"]},
            ],
        )
        state = {"model": {}, "optim": {"state": {}, "param_groups": groups}, "epoch": 3}
        for name in tensors:
            where, _, rest = name.removeprefix("optim.").partition(".")
            if where == "model":
                state["model"][rest] = tensors.full(name)
            else:
                parameter, _, key = rest.rpartition(".")
                state["optim"]["state"].setdefault(parameter, {})[key] = tensors.full(name)
        folder = dcp_saved(tmp_path / "dcp", {"app": state} if root else state)
        notes = convert(folder, tmp_path / "back")
        found, facts = Tensors(tmp_path / "back"), manifest.read(tmp_path / "back")
        assert set(found) == set(tensors)
        assert all(torch.equal(found.full(name), tensors.full(name)) for name in tensors)
        assert [group.names for group in facts.optimizer.groups] == [["a.weight", "a.scale"], ["0.bias"]]
        assert [group.options for group in facts.optimizer.groups] == [{"lr": 0.5, "betas": [0.9, 0.99]}, {"lr": 0.2}]
        assert (facts.step, facts.frozen) == (5, ["steps", "still"])
        assert any(note.startswith("not converted: ") for note in notes)

    def test_takes_back_what_was_written_for_it(self, ours, tmp_path):
        convert(ours, tmp_path / "dcp", to="dcp")
        convert(tmp_path / "dcp", tmp_path / "back")
        here, back = manifest.read(ours), manifest.read(tmp_path / "back")
        assert back.tensors == here.tensors
        assert [group.names for group in back.optimizer.groups] == [group.names for group in here.optimizer.groups]
        for now, then in zip(back.optimizer.groups, here.optimizer.groups, strict=True):
            assert then.options.items() <= now.options.items()
            assert not [key for key in now.options if "." in key]

    def test_a_model_alone(self, tmp_path):
        folder = dcp_saved(tmp_path / "dcp", {"model": {"a": torch.ones(3)}})
        convert(folder, tmp_path / "new")
        facts = manifest.read(tmp_path / "new")
        assert (facts.optimizer, facts.schedule, facts.frozen) == (None, None, [])

    def test_no_model_at_all(self, tmp_path):
        folder = dcp_saved(tmp_path / "dcp", {"a": torch.ones(3)})
        with pytest.raises(CheckpointError, match="no model under model"):
            convert(folder, tmp_path / "new")

    def test_state_of_what_the_model_does_not_have(self, tmp_path):
        folder = dcp_saved(
            tmp_path / "dcp", {"model": {"a": torch.ones(3)}, "optim": {"state": {"b": {"exp_avg": torch.ones(3)}}}}
        )
        with pytest.raises(CheckpointError, match="state of 'b', which the model does not have"):
            convert(folder, tmp_path / "new")

    def test_runs_nothing(self, tmp_path):
        state = {
            "state": {"a": {"exp_avg": torch.ones(3)}},
            "param_groups": [{"lr": Bomb(tmp_path / "bang"), "eps": 0.5, "params": ["a"]}],
        }
        folder = dcp_saved(tmp_path / "dcp", {"model": {"a": torch.ones(3)}, "optim": state})
        notes = convert(folder, tmp_path / "new")
        assert not (tmp_path / "bang").exists()
        assert any("optim.param_groups.0.lr" in note for note in notes)
        assert manifest.read(tmp_path / "new").optimizer.groups[0].options == {"eps": 0.5}


class Bomb:
    """Makes a folder where it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_the_command_needs_no_engine_to_be_imported():
    code = "import sys, unishard.cli; from unishard.contract import registry\n"
    code += "for name in registry.available(): registry.get(name).checkpoint_formats\n"
    code += "print({'torch', 'deepspeed'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
