"""A short file asks for no more than it is long; what torch writes is never refused for it."""

from __future__ import annotations

import io
import pickle
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from unishard.checkpoint import budgets, index_classes, metadata
from unishard.checkpoint.archives import require_bounded
from unishard.checkpoint.files import path_of
from unishard.checkpoint.user_state import once, pack, unpack
from unishard.errors import CheckpointError, ContractError


def index(chunks: int, *, shared: bool, dims: int = 1) -> bytes:
    """torch's index of a tensor: each chunk an object of its own, as torch writes them, or one that all places refer
    to."""
    one = ChunkStorageMetadata(torch.Size([0] * dims), torch.Size([0] * dims))
    parts = [
        one if shared else ChunkStorageMetadata(torch.Size([at] * dims), torch.Size([1] * dims)) for at in range(chunks)
    ]
    size = torch.Size([0] * dims if shared else [chunks] * dims)
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), size, parts)
    places = {
        MetadataIndex("a", part.offsets, at): index_classes.place(f"__{at}_0.distcp", 0, 4)
        for at, part in enumerate(parts)
    }
    return pickle.dumps(Metadata({"a": entry}, {"a": ("a",)}, places))


def test_references_to_one_chunk_are_counted_before_they_are_followed(tmp_path: Path) -> None:
    (tmp_path / metadata.FILE).write_bytes(index(100_000, shared=True))
    with pytest.raises(CheckpointError, match=r"has 100000 chunks, more than a file of \d+ bytes can"):
        metadata.read(tmp_path)


@pytest.mark.parametrize("dims", [1, 8])
def test_an_index_of_many_ranks_is_read(tmp_path: Path, dims: int) -> None:
    """Of 1,024 ranks; what each chunk takes does not depend on how many there are."""
    data = index(1024, shared=False, dims=dims)
    assert len(data) > 4 * metadata._CHUNK * 1024
    left = metadata._Unpickler(data)
    found = left.load()
    assert len(found.storage_data) == 1024
    assert left._left > budgets.steps_of(0)  # genuine files do not even use up what their bytes allow


def test_a_key_is_text_or_a_place(tmp_path: Path) -> None:
    inner: Any = (1,)
    for _ in range(60):
        inner = (inner, inner)
    place = MetadataIndex("a")
    object.__setattr__(place, "offset", inner)
    for key in (inner, MetadataIndex(inner), place, torch.float32):  # type: ignore[arg-type]
        (tmp_path / metadata.FILE).write_bytes(b"\x80\x02}" + pickle.dumps(key, 2)[2:-1] + b"K\x01s.")  # {key: 1}
        with pytest.raises(CheckpointError, match=r"has a key of the type|means far more than its size"):
            metadata.read(tmp_path)


def test_what_torch_saves_is_within_its_budget() -> None:
    expanded, large = torch.ones(1).expand(1000, 1000), torch.arange(100.0)
    state = {
        "model": OrderedDict(a=large, b=large, c=large[10:20], mask=expanded, p=torch.nn.Parameter(large)),
        "rng": (3, tuple(range(625)), None),
        "groups": [{"betas": (0.9, 0.999), "params": list(range(1000))}] * 50,
        "tuples": {(1, "a"): torch.int8, 2: {"set": {1, "b", (2, 3)}}},
        "shape": OrderedDict(a=torch.Size([2, 3])),
        "nested": ((((1, 2), 3), 4), 5),
        "count": Counter("aab"),
        "sparse": torch.eye(3).to_sparse(),
    }
    for value in (state, torch.ones(0), torch.tensor(1.0), OrderedDict()):
        file = io.BytesIO()
        torch.save(value, file)
        require_bounded(file)
        assert file.tell() == 0
        torch.load(file, weights_only=True)


def test_a_state_refers_to_no_tensor_twice(tmp_path: Path) -> None:
    packed, held = pack({"a": torch.ones(2), "b": [torch.ones(2), b"x"]})
    assert unpack(packed, once(held.__getitem__))["b"][1] == b"x"
    name = next(iter(held))
    with pytest.raises(CheckpointError, match=r"refers to the tensor 'state.a' twice"):
        unpack([{"$tensor": name}] * 2, once(held.__getitem__))


def test_a_name_that_no_file_can_have_is_one_error() -> None:
    for given in ("a\0b", "a\ud800", "", 3):
        with pytest.raises(ContractError, match=r"save: .* is not a path; pass the path of a directory"):
            path_of(given, "save")  # type: ignore[arg-type]
    assert path_of("a\udc80", "save") == Path("a\udc80")  # a byte that is not UTF-8
