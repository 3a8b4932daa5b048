"""A directory that one process writes: torch's own readers open it, and ours reads any stretch of it."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from unishard.checkpoint import writing
from unishard.checkpoint.hashing import hash_of
from unishard.checkpoint.summary import summary_of
from unishard.checkpoint.tensor_reader import ReadRequest, Tensors
from unishard.distributed.lazy_shards import LazyShard, lazy_shard_of
from unishard.distributed.shards import Shard
from unishard.errors import CheckpointError

WHOLE = {
    "model.a.weight": torch.randn(7, 11, 3, generator=torch.Generator().manual_seed(0)),
    "model.scalar": torch.tensor(2.5),
    "model.low": torch.arange(50.0).bfloat16(),
    "optim.state.a.weight.exp_avg": torch.randn(7, 11, 3, generator=torch.Generator().manual_seed(1)),
    "optim.state.a.weight.step": torch.tensor(3.0),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(writing, "BUFFER", 24)
    monkeypatch.setattr(writing, "CHUNK", 64)  # so that these tensors have many chunks
    written = writing.write(
        tmp_path / "here",
        {name: lazy_shard_of(Shard(value.shape, value)) for name, value in WHOLE.items()},
        ties={"b": "a.weight"},
    )
    assert written is not None
    for name, (size, crc) in written.files.items():
        data = (tmp_path / "here" / name).read_bytes()
        assert (len(data), zlib.crc32(data)) == (size, crc)
    assert {path.name for path in (tmp_path / "here").iterdir()} == written.files.keys()
    assert written.hashes == {
        name: hash_of(value.reshape(-1)) for name, value in (WHOLE | {"model.b": WHOLE["model.a.weight"]}).items()
    }
    return tmp_path / "here"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_it_under_every_name(folder: Path, tmp_path: Path) -> None:
    dcp_to_torch_save(folder, tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt")
    assert torch.equal(found["model"]["a.weight"], WHOLE["model.a.weight"])
    assert torch.equal(found["model"]["b"], WHOLE["model.a.weight"])
    assert torch.equal(found["model"]["low"], WHOLE["model.low"])
    assert torch.equal(found["optim"]["state"]["a.weight"]["exp_avg"], WHOLE["optim.state.a.weight.exp_avg"])
    assert found["optim"]["state"]["a.weight"]["step"] == 3


def test_any_stretch_is_read(folder: Path) -> None:
    tensors = Tensors(folder)
    for name, value in WHOLE.items():
        assert torch.equal(tensors.full(name), value)
    flat = WHOLE["model.a.weight"].reshape(-1)
    for begin in range(0, 231, 13):
        target = torch.full((231 - begin,), torch.nan, dtype=torch.float64)
        tensors.read([ReadRequest("model.a.weight", begin, target)])
        assert torch.equal(target, flat[begin:].double())


def test_missing_elements_are_refused(tmp_path: Path) -> None:
    value = torch.arange(10.0)
    half = LazyShard(value.shape, value.dtype, 0, 5, lambda begin, end: value[begin:end])
    with pytest.raises(CheckpointError, match=r"no rank holds some or all elements of model\.a"):
        writing.write(tmp_path / "here", {"model.a": half})


def test_a_name_that_is_not_there_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tensor 'model\.c'"):
        Tensors(folder).full("model.c")


def test_a_truncated_file_is_named(folder: Path) -> None:
    file = folder / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-2000])
    tensors = Tensors(folder)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: .* it is damaged"):
        tensors.read([ReadRequest(name, 0, torch.empty(value.numel())) for name, value in WHOLE.items()])


def test_norms_are_those_of_all_parameters_together_and_of_each_kind_of_state(tmp_path: Path) -> None:
    tensors = {
        "model.a": torch.tensor([3.0, 0.0]),
        "model.b": torch.tensor([4.0]),
        "model.buffer": torch.tensor([9.0]),
        "optim.state.a.exp_avg": torch.tensor([6.0, 8.0]),
        "optim.state.a.step": torch.tensor(7.0),
    }
    written = writing.write(
        tmp_path / "here", {name: lazy_shard_of(Shard(value.shape, value)) for name, value in tensors.items()}
    )
    assert written is not None
    assert summary_of(written, ["buffer"])["norms"] == {"parameters": 5.0, "exp_avg": 10.0}
