"""Pieces of the state in a file: each element is stepped once, in a piece that holds it, cut where a vector ends."""

from __future__ import annotations

from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unishard.nvme import file_space
from unishard.nvme.file_space import FileSpace
from unishard.nvme.rank_file import ALIGNED
from unishard.nvme.streams import OVERLAP

SIZES = st.lists(st.integers(0, 3 * ALIGNED), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(SIZES, st.data())
def test_each_element_is_in_one_piece(sizes, data):
    with mock.patch.object(file_space, "PIECE", ALIGNED):
        tensors = [torch.empty(size) for size in sizes]
        space = FileSpace(tensors, {"moment": torch.float32})
        whole = data.draw(st.sampled_from(tensors))
        start = data.draw(st.integers(0, whole.numel()))
        stop = data.draw(st.integers(start, whole.numel()))
        some = [each for each in tensors if each is not whole]
        part = whole[start:stop]
        stepped = [*some, part] if part.numel() else some
        pieces = space.cuts(stepped)
    assert list(pieces) == sorted(pieces)
    for tensor in stepped:
        own = [(number, cut) for number, cuts in pieces.items() for cut in cuts if cut.tensor is tensor]
        assert [cut.start for _, cut in own] == [0, *(cut.stop for _, cut in own[:-1])]
        assert own[-1][1].stop == tensor.numel()
        assert all(cut.start % 64 == 0 for _, cut in own)
        assert all(0 <= cut.at <= cut.at + cut.stop - cut.start <= ALIGNED + OVERLAP for _, cut in own)
        first = own[0][0] * ALIGNED + own[0][1].at
        assert all(number * ALIGNED + cut.at == first + cut.start for number, cut in own)


@settings(max_examples=60, deadline=None)
@given(SIZES)
def test_no_two_tensors_share_an_element(sizes):
    with mock.patch.object(file_space, "PIECE", ALIGNED):
        tensors = [torch.empty(size) for size in sizes]
        space = FileSpace(tensors, {"moment": torch.float32})
        pieces = space.cuts(tensors)
    places = sorted(
        (number * ALIGNED + cut.at, cut.stop - cut.start) for number, cuts in pieces.items() for cut in cuts
    )
    ends = [start + numel for start, numel in places]
    assert all(end <= start for end, (start, _) in zip(ends, places[1:], strict=False))
    assert ends[-1] <= space.nbytes // 4
