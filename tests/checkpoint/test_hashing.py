"""The hash of a tensor: the same however it is divided, another one when a bit changes or two elements change
places."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unishard.checkpoint.hashing import MASK, hash_of

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8]


@given(st.sampled_from(DTYPES), st.integers(1, 300), st.data())
def test_pieces_add_up_to_the_whole(dtype: torch.dtype, length: int, data: st.DataObject) -> None:
    whole = (torch.arange(length, dtype=torch.float64) * 37 % 251).to(dtype)
    cuts = sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=5))})
    parts = [hash_of(whole[begin:end].clone(), begin) for begin, end in pairwise(cuts)]
    assert sum(parts) & MASK == hash_of(whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_add_up_to_the_whole(dtype: torch.dtype) -> None:
    whole = torch.randn(600_001, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert (hash_of(whole[:300_003]) + hash_of(whole[300_003:], 300_003)) & MASK == hash_of(whole)


@given(st.integers(0, 99), st.integers(0, 31))
def test_a_flipped_bit_is_another_hash(at: int, bit: int) -> None:
    values = torch.arange(100, dtype=torch.int32)
    before = hash_of(values.view(torch.float32))
    values[at] ^= torch.tensor(1, dtype=torch.int32).bitwise_left_shift(bit)
    assert hash_of(values.view(torch.float32)) != before


@given(st.integers(0, 99), st.integers(0, 99))
def test_exchanged_elements_are_another_hash(one: int, other: int) -> None:
    values = torch.arange(1.0, 101.0)
    before = hash_of(values)
    values[one], values[other] = values[other].clone(), values[one].clone()
    assert (hash_of(values) == before) is (one == other)


def test_the_formula_is_the_one_in_the_documentation() -> None:
    assert hash_of(torch.tensor([1, 2, 3], dtype=torch.int32)) == (1 + (2 << 32)) * 1 + 3 * 3


def test_a_thread_that_hashed_in_inference_mode_hashes_outside_of_it() -> None:
    values, found = torch.arange(1000), []

    def both() -> None:
        with torch.inference_mode():
            found.append(hash_of(values))
        found.append(hash_of(values))

    thread = threading.Thread(target=both)
    thread.start()
    thread.join()
    assert found == [hash_of(values)] * 2
