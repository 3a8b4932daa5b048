"""Our own index: the chunks of torch's index, of which a rank reads only the rows that it needs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from unishard.checkpoint import metadata, shard_index, writing
from unishard.checkpoint.chunks import Chunk, ChunkTable, ListedChunks
from unishard.checkpoint.shard_index import ShardIndex, open_index
from unishard.checkpoint.tensor_reader import ReadRequest, Tensors
from unishard.distributed.lazy_shards import lazy_shard_of
from unishard.distributed.shards import Shard
from unishard.errors import CheckpointError

WHOLE = {
    "model.a.weight": torch.randn(7, 11, 3, generator=torch.Generator().manual_seed(0)),
    "model.scalar": torch.tensor(2.5),
    "model.low": torch.arange(50.0).bfloat16(),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(writing, "CHUNK", 64)  # so that these tensors have many chunks
    shards = {name: lazy_shard_of(Shard(value.shape, value)) for name, value in WHOLE.items()}
    writing.write(tmp_path / "here", shards, ties={"b": "a.weight"})
    return tmp_path / "here"


def held(table: ChunkTable, name: str) -> list[Chunk]:
    return sorted(table.chunks(name, 0, table.shapes[name].numel()), key=lambda chunk: chunk.offsets)


def listed(folder: Path) -> ChunkTable:
    """The table of torch's index."""
    return Tensors(folder, verify=True)._table


def test_it_says_what_torch_s_index_says(folder: Path) -> None:
    own, theirs = open_index(folder), listed(folder)
    assert isinstance(own, ShardIndex)
    assert isinstance(theirs, ListedChunks)
    assert own.shapes == theirs.shapes
    assert own.dtypes == theirs.dtypes
    assert [*own.shapes] == [*theirs.shapes] == [*WHOLE, "model.b"]
    for name in own.shapes:
        assert held(own, name) == held(theirs, name)


def test_a_checkpoint_without_it_is_read(folder: Path) -> None:
    (folder / shard_index.FILE).unlink()
    assert isinstance(Tensors(folder)._table, ListedChunks)
    assert torch.equal(Tensors(folder).full("model.b"), WHOLE["model.a.weight"])


def test_it_is_passed_over_where_torch_has_written_another_index(folder: Path) -> None:
    with (folder / metadata.FILE).open("ab") as file:
        file.write(b"more")
    assert open_index(folder) is None


def played(tensors: int, ranks: int) -> bytes:
    """The index of so many tensors, each sharded over so many ranks by rows."""
    rows = [(rank * 64, rank, 1000, 300) for rank in range(ranks)]
    shapes = {f"model.{number}": (torch.float32, (ranks, 64)) for number in range(tensors)}
    return shard_index.bytes_of(shapes, dict.fromkeys(shapes, rows), [f"__{rank}_0.distcp" for rank in range(ranks)], 3)


@pytest.mark.parametrize("ranks", [8, 1024, 16_384])
def test_a_rank_reads_as_many_rows_as_the_logarithm_of_the_ranks(tmp_path: Path, ranks: int) -> None:
    (tmp_path / shard_index.FILE).write_bytes(played(3, ranks))
    (tmp_path / metadata.FILE).write_bytes(b"any")
    index = open_index(tmp_path)
    assert index is not None
    rank = ranks // 3
    (chunk,) = index.chunks("model.1", rank * 64, rank * 64 + 64)
    assert (chunk.file, chunk.offsets, chunk.sizes) == (f"__{rank}_0.distcp", (rank, 0), (1, 64))
    assert index.looked_at <= ranks.bit_length() + 2


def test_torch_s_index_is_searched_and_not_scanned(folder: Path) -> None:
    """As many chunks as overlap, of boxes that interleave in the flattened tensor too."""
    boxes = [
        Chunk("x", (64, 64), (row, column), (8, 16), "f", 0, 0)
        for row in range(0, 64, 8)
        for column in range(0, 64, 16)
    ]
    table = ListedChunks(
        {"x": random.Random(0).sample(boxes, len(boxes))}, {"x": torch.Size((64, 64))}, {"x": torch.float32}
    )
    for begin in range(0, 4096, 97):
        found = set(table.chunks("x", begin, begin + 50))
        needed = {box for box in boxes if any(begin <= at < begin + 50 for at in _elements(box))}
        assert needed <= found
        assert len(found) <= 8


def _elements(box: Chunk) -> Iterator[int]:
    (row, column), (rows, columns) = box.offsets, box.sizes
    return (64 * (row + down) + column + across for down in range(rows) for across in range(columns))


def damaged(data: bytes, seed: int) -> bytes:
    chance = random.Random(seed)
    at = chance.randrange(len(data))
    match seed % 3:
        case 0:
            return data[:at]
        case 1:
            return data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]
    return data[:at] + data[at + 8 :]


def test_a_damaged_index_never_fails_in_another_way(folder: Path, deep: bool) -> None:
    data = (folder / shard_index.FILE).read_bytes()
    for seed in range(300 if deep else 100):
        (folder / shard_index.FILE).write_bytes(damaged(data, seed))
        try:
            tensors = Tensors(folder)
            for name in tensors:
                numel = tensors.shapes[name].numel()
                if numel < 10_000:
                    tensors.read([ReadRequest(name, 0, torch.empty(numel))])
        except CheckpointError:
            continue


@pytest.mark.parametrize("name", ["../secret", "/secret", "a/b", "nul\0"])
def test_it_names_no_file_elsewhere(tmp_path: Path, name: str) -> None:
    (tmp_path / shard_index.FILE).write_bytes(
        shard_index.bytes_of({"a": (torch.float32, (2,))}, {"a": [(0, 0, 0, 8)]}, [name], 3)
    )
    (tmp_path / metadata.FILE).write_bytes(b"any")
    with pytest.raises(CheckpointError, match="outside the directory"):
        Tensors(tmp_path)
