"""The index of a directory is a pickle that anybody may have written: nothing in it runs, and whatever is wrong with it
is one error."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from stored import store
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
)

from unishard.checkpoint import metadata
from unishard.checkpoint.tensor_reader import Tensors
from unishard.checkpoint.verifying import opened
from unishard.errors import CheckpointError


class Calls:
    """Pickles to a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def hostile(flag: Path) -> dict[str, bytes]:
    """Files that would leave a flag when they are opened."""
    code = f"open({str(flag)!r}, 'w').close()"
    calls = {
        "os.system": Calls(os.system, f"touch {flag}"),
        "subprocess": Calls(subprocess.call, ["touch", str(flag)]),
        "eval": Calls(eval, code),
        "exec": Calls(exec, code),
        "getattr": Calls(getattr, os, "system"),
        "torch.load": Calls(torch.load, str(flag)),
        "open": Calls(open, str(flag), "w"),
        "in an index": Metadata({"model.a": Calls(os.system, f"touch {flag}")}),  # type: ignore[dict-item]
    }
    files = {}
    for name, call in calls.items():
        try:
            files[name] = pickle.dumps(call)
        except TypeError:  # a module cannot be pickled
            files[name] = b"cbuiltins\ngetattr\n(cos\nsystem\ntR."
    files["a name with dots"] = b"\x80\x04\x8c\x05torch\x8c\x14serialization.os.sys\x93."
    files["inst"] = b"(S'touch'\nios\nsystem\n."
    files["persistent"] = b"Ptouch\n."
    return files


@pytest.mark.parametrize("which", hostile(Path("flag")))
def test_nothing_runs(which: str, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    (tmp_path / metadata.FILE).write_bytes(hostile(flag)[which])
    with pytest.raises(CheckpointError, match=r"\.metadata: "):
        metadata.read(tmp_path)
    assert not flag.exists()


def test_the_check_would_notice(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    pickle.loads(hostile(flag)["os.system"])
    assert flag.exists()


def test_paths_are_read_as_any_version_of_python_writes_them() -> None:
    for module in (b"pathlib", b"pathlib._local"):  # the latter by Python 3.13
        assert metadata._Unpickler(io.BytesIO(b"c" + module + b"\nPosixPath\n(S'x'\ntR.")).load() == Path("x")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_torch_writes_is_read(tmp_path: Path) -> None:
    state = {
        "model": {"a": torch.randn(3, 5), "b": torch.tensor(1.0), "c": torch.zeros(0, 4)},
        "low": [
            torch.ones(2, dtype=dtype)
            for dtype in (torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64)
        ],
        "step": 3,
        "name": "run",
        "raw": b"\0\1",
        "io": io.BytesIO(b"x"),
    }
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    found = metadata.read(tmp_path)
    expected = dcp.FileSystemReader(tmp_path).read_metadata()
    assert (found.state_dict_metadata, found.storage_data) == (expected.state_dict_metadata, expected.storage_data)
    tensors = Tensors(tmp_path)
    assert torch.equal(tensors.full("model.a"), state["model"]["a"])
    assert tensors.shapes["model.c"] == (0, 4)
    assert {"step", "name", "raw", "io"} <= tensors.others


def test_what_an_early_python_3_11_writes_is_read(folder: Path, broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It pickles the member of an enum as a call of getattr."""
    monkeypatch.setattr(
        _MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, protocol: (getattr, (type(self), self.name))
    )
    data = pickle.dumps(pickle.loads((folder / metadata.FILE).read_bytes()))
    assert b"getattr" in data
    (broken / metadata.FILE).write_bytes(data)
    assert metadata.read(broken) == metadata.read(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    store(folder)
    return folder


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("broken")


def test_a_truncated_index_is_refused(folder: Path, broken: Path) -> None:
    data = (folder / metadata.FILE).read_bytes()
    for length in range(0, len(data), 7):
        (broken / metadata.FILE).write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"\.metadata: "):
            metadata.read(broken)


def test_a_damaged_index_of_ours_is_not_even_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wrong byte may mean any amount of memory."""
    facts = store(tmp_path)
    data = bytearray((tmp_path / metadata.FILE).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / metadata.FILE).write_bytes(data)
    monkeypatch.setattr(metadata, "_Unpickler", None)
    with pytest.raises(CheckpointError, match=r"\.metadata: has CRC-32 \w+ instead of"):
        opened(tmp_path, facts)


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        Metadata({1: BytesStorageMetadata()}),  # type: ignore[dict-item]
        Metadata({"a": None}),  # type: ignore[dict-item]
        Metadata({"a": BytesStorageMetadata()}),
        Metadata({}, storage_data={"a": 1}),
    ],
)
def test_what_is_no_index_is_refused(wrong: Any, tmp_path: Path) -> None:
    (tmp_path / metadata.FILE).write_bytes(pickle.dumps(wrong))
    with pytest.raises(CheckpointError, match="damaged"):
        metadata.read(tmp_path)


def test_a_folder_without_an_index_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"No such file or directory; this is not a torch"):
        metadata.read(tmp_path)
