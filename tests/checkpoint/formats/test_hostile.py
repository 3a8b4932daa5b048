"""Checkpoints that somebody else has made to read other files, to fill the memory, or to run code."""

from __future__ import annotations

import io
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_files import lay_out
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.metadata import MetadataIndex

from unishard.checkpoint import index_classes, metadata
from unishard.checkpoint.convert import convert
from unishard.checkpoint.tensor_reader import Tensors
from unishard.engine.model import weight_files
from unishard.errors import CheckpointError, ModelError

SMALL = [{"a.weight": (3, 5)}]


def plain(folder: Path) -> Path:
    """A directory as an FSDP script saves it, with an optimizer."""
    state = {"state": {"a": {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.5, "params": ["a"]}]}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        state_dict_saver.save({"model": {"a": torch.ones(3)}, "optim": state}, checkpoint_id=folder, no_dist=True)
    return folder


def edit(folder: Path, change: Any) -> None:
    """Change the index of a directory, which is a pickle of torch."""
    index = pickle.loads((folder / metadata.FILE).read_bytes())
    change(index)
    (folder / metadata.FILE).write_bytes(pickle.dumps(index))


def moved(name: str, file: str) -> Any:
    """Let the index say that a record lies in another file."""

    def change(index: Any) -> None:
        (at,) = (each for each in index.storage_data if each.fqn == name)
        place = index.storage_data[at]
        index.storage_data[at] = index_classes.place(file, place.offset, place.length)

    return change


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("name", ["model.a", "optim.param_groups.0.lr"])
def test_an_index_names_no_file_elsewhere(tmp_path: Path, name: str, absolute: bool) -> None:
    folder, secret = plain(tmp_path / "theirs"), tmp_path / "secret"
    secret.write_bytes((folder / "__0_0.distcp").read_bytes())
    edit(folder, moved(name, str(secret) if absolute else "../secret"))
    with pytest.raises(CheckpointError, match=r"outside the (directory|folder).*do not trust this checkpoint"):
        convert(folder, tmp_path / "ours")


def test_a_file_of_tensors_is_no_link_elsewhere(tmp_path: Path) -> None:
    folder = plain(tmp_path / "theirs")
    (folder / "__0_0.distcp").rename(tmp_path / "secret")
    (folder / "__0_0.distcp").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"__0_0.distcp.*link.*outside the folder"):
        Tensors(folder).full("model.a")
    with pytest.raises(CheckpointError, match=r"__0_0.distcp.*link.*outside the folder"):
        convert(folder, tmp_path / "ours")


def test_links_of_the_hugging_face_cache_are_read(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "blobs", plain(tmp_path / "snapshots" / "0123")
    blobs.mkdir()
    (folder / "__0_0.distcp").rename(blobs / "4567")
    (folder / "__0_0.distcp").symlink_to(Path("../../blobs/4567"))
    assert torch.equal(Tensors(folder).full("model.a"), torch.ones(3))


def test_a_tensor_that_cannot_be_is_one_error(tmp_path: Path) -> None:
    folder, most = plain(tmp_path / "theirs"), 2**60

    def enlarge(index: Any) -> None:
        entry = index.state_dict_metadata["model.a"]
        entry.size, entry.chunks[0].sizes = torch.Size([most]), torch.Size([most])

    edit(folder, enlarge)
    with pytest.raises(CheckpointError, match=r"holds less than the \d+ bytes of model.a; it is damaged"):
        convert(folder, tmp_path / "ours")


def test_a_record_that_unpacks_to_much_more_is_refused(tmp_path: Path) -> None:
    """torch.save never compresses; torch.load would allocate what the archive names."""
    folder = plain(tmp_path / "theirs")
    data = (folder / "__0_0.distcp").read_bytes()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 2**22)
    (folder / "__0_0.distcp").write_bytes(data + packed.getvalue())

    def point(index: Any) -> None:
        at = MetadataIndex("model.a", torch.Size([0]))
        index.storage_data[at] = index_classes.place("__0_0.distcp", len(data), len(packed.getvalue()))

    edit(folder, point)
    with pytest.raises(CheckpointError, match="compressed"):
        convert(folder, tmp_path / "ours")


@pytest.mark.parametrize("latest", ["../elsewhere", "/elsewhere", "global\0step", "x" * 5000])
def test_latest_of_deepspeed_names_no_folder_elsewhere(tmp_path: Path, latest: str) -> None:
    lay_out(tmp_path / "elsewhere", SMALL)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "elsewhere" / "global_step7").rename(tmp_path / "taken")
    (tmp_path / "taken").rename(tmp_path / "elsewhere" / "inner")
    for path in (tmp_path / "elsewhere" / "inner").iterdir():
        path.rename(tmp_path / "elsewhere" / path.name)
    named = str(tmp_path) + latest if latest.startswith("/") else latest
    (tmp_path / "theirs" / "latest").write_text(named)
    with pytest.raises(CheckpointError):
        convert(tmp_path / "theirs", tmp_path / "ours", from_="deepspeed")


def test_a_file_of_deepspeed_is_no_link_elsewhere(tmp_path: Path) -> None:
    lay_out(tmp_path / "theirs", SMALL)
    (file,) = (tmp_path / "theirs" / "global_step7").glob("*_rank_0_*_optim_states.pt")
    file.rename(tmp_path / "secret")
    file.symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"link.*outside the folder"):
        convert(tmp_path / "theirs", tmp_path / "ours")


BROKEN = {
    "elsewhere": ('{"weight_map": {"a": "../model.safetensors"}}', r"\.\./model.safetensors.*outside the folder"),
    "absolute": ('{"weight_map": {"a": "/model.safetensors"}}', "outside the folder"),
    "nul": ('{"weight_map": {"a": "model\\u0000"}}', "outside the folder"),
    "a number": ('{"weight_map": {"a": 3}}', "weight_map"),
    "a list": ('{"weight_map": []}', "weight_map"),
    "nothing": ("{}", "weight_map"),
    "no mapping": ("[]", "weight_map"),
    "no json": ("{", "is not JSON"),
    "deep": ("[" * 100_000, "is not JSON"),
    "no text": (b"\xff\xfe", "is not JSON"),
    "missing": ('{"weight_map": {"a": "gone.safetensors"}}', "in the index but missing"),
}


@pytest.mark.parametrize(("index", "says"), BROKEN.values(), ids=BROKEN)
def test_an_index_of_safetensors_is_not_trusted(tmp_path: Path, index: str | bytes, says: str) -> None:
    (tmp_path / "model.safetensors").touch()
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_bytes(index if isinstance(index, bytes) else index.encode())
    with pytest.raises(ModelError, match=says):
        weight_files.files_of(folder)


def test_weights_are_no_link_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret").touch()
    (folder / "a.safetensors").symlink_to(tmp_path / "secret")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "a.safetensors"}}')
    with pytest.raises(ModelError, match=r"link.*outside the folder"):
        weight_files.files_of(folder)
