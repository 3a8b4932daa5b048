"""Where each tensor lies depends on names, shapes, dtypes and the limit alone; safetensors reads it."""

from __future__ import annotations

import itertools
import json
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from unishard.checkpoint.export.plan import ExportedTensor, File, bytes_of, index_of, plan
from unishard.checkpoint.export.shares import missing, share
from unishard.errors import CheckpointError

_DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.bool),
    *(torch.int64, torch.uint64, torch.int32, torch.uint32, torch.int16, torch.uint16, torch.int8, torch.uint8),
)
_NAMES = st.text('abc.019-é"\\', min_size=1, max_size=8)
ENTRIES = st.dictionaries(
    _NAMES,
    st.tuples(st.lists(st.integers(0, 4), max_size=3).map(tuple), st.sampled_from(_DTYPES)),
    min_size=1,
    max_size=9,
).map(lambda found: [ExportedTensor(name, name, shape, dtype) for name, (shape, dtype) in found.items()])


@given(ENTRIES, st.integers(1, 200), st.randoms(use_true_random=False))
def test_files_hold_every_tensor_once_aligned_and_in_any_order_of_the_entries_alike(
    entries: list[ExportedTensor], most: int, chance: random.Random
) -> None:
    files = plan(entries, "model", most)
    assert sorted(place.entry for file in files for place in file.places) == sorted(
        entries, key=lambda entry: entry.name
    )
    shuffled = entries.copy()
    chance.shuffle(shuffled)
    assert plan(shuffled, "model", most) == files
    for file in files:
        assert_is_safetensors(file)
        assert len(file.places) == 1 or file.size - len(file.header) <= most
    assert json.loads(index_of(files))["weight_map"].keys() == {entry.name for entry in entries}


def assert_is_safetensors(file: File) -> None:
    loaded = load(file.header + bytes(file.size - len(file.header)))
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in loaded.items()} == {
        place.entry.name: (place.entry.shape, place.entry.dtype) for place in file.places
    }
    assert all(place.at % place.entry.dtype.itemsize == 0 for place in file.places)


@given(ENTRIES)
def test_a_file_has_the_bytes_that_safetensors_writes(entries: list[ExportedTensor]) -> None:
    (file,) = plan(entries, "model", None)
    tensors = {entry.name: torch.zeros(entry.shape, dtype=entry.dtype) for entry in entries}
    assert file.header + bytes(file.size - len(file.header)) == save(tensors, metadata={"format": "pt"})


def test_layers_are_split_in_the_order_of_their_numbers_and_a_large_tensor_has_a_file_of_its_own() -> None:
    entries = [
        ExportedTensor(f"layers.{number}.weight", "", (1000 if number == 2 else 10,), torch.float32)
        for number in (10, 1, 2, 9)
    ]
    files = plan(entries, "model", 100)
    assert [[place.entry.name for place in file.places] for file in files] == [
        ["layers.1.weight"],
        ["layers.2.weight"],
        ["layers.10.weight", "layers.9.weight"],
    ]
    assert [file.name for file in files] == [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    assert [file.name for file in plan(entries, "model", 10_000)] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("size", "expected"), [("5GB", 5 * 10**9), (" 1.5 mb", 1_500_000), ("2TB", 2 * 10**12), (4096, 4096), ("70", 70)]
)
def test_sizes_are_those_of_transformers(size: int | str, expected: int) -> None:
    from huggingface_hub.serialization._base import parse_size_to_int

    assert bytes_of(size) == expected
    if isinstance(size, str) and size.strip()[-1] in "Bb":
        assert parse_size_to_int(size) == expected


@pytest.mark.parametrize("size", ["5GiB", "GB", "", "-1GB", 0, "many", "0.1", "nanGB", "infGB"])
def test_other_sizes_are_refused(size: int | str) -> None:
    with pytest.raises(
        CheckpointError, match=r"max_shard_size: invalid size .*; expected bytes, or a number with KB, MB, GB, TB"
    ):
        bytes_of(size)


def test_a_dtype_that_the_files_do_not_have_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"a is torch\.complex128"):
        plan([ExportedTensor("a", "a", (1,), torch.complex128)], "model", None)


@given(st.integers(0, 60), st.lists(st.integers(0, 60), max_size=4), st.integers(1, 3))
def test_what_ranks_write_of_a_tensor_is_all_of_it_once(numel: int, cuts: list[int], copies: int) -> None:
    bounds = [0, *sorted(min(cut, numel) for cut in cuts), numel]
    held = list(itertools.starmap(range, itertools.pairwise(bounds))) * copies
    assert missing(held, numel) is None
    written = [element for rank in range(len(held)) for element in share(held, rank)]
    assert sorted(written) == list(range(numel))


def test_what_nobody_holds_is_found() -> None:
    assert missing([range(3), range(4, 9)], 9) == 3
    assert missing([range(3), range(2, 8)], 9) == 8
    assert missing([range(1, 9)], 9) == 0
    assert missing([range(9), range(3, 3)], 9) is None
