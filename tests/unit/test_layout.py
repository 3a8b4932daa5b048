"""Which interval of a tensor each rank holds: no element twice, none missing, and where torch and DeepSpeed cut."""

from __future__ import annotations

from itertools import chain
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unishard.distributed.layout import flat, flat_group, rows, whole

RANKS = st.integers(1, 7)
SHAPES = st.lists(st.integers(0, 9), max_size=3)


def together(layout):
    return list(chain.from_iterable(map(layout.of, range(layout.ranks))))


@given(shape=SHAPES, ranks=RANKS)
def test_rows_are_those_of_a_chunk(shape, ranks):
    layout = rows(shape, ranks)
    chunks = torch.arange(prod(shape)).view(*shape, *[1] * (not shape)).chunk(ranks)
    held = [[*each.flatten().tolist()] for each in chunks]
    assert [[*layout.of(rank)] for rank in range(ranks)] == held + [[]] * (ranks - len(held))
    assert {layout.padded(rank) * ranks for rank in range(ranks)} == {layout.length}


@given(numels=st.lists(st.integers(0, 30), min_size=1, max_size=5), ranks=RANKS, align=st.sampled_from([1, 4]))
def test_a_flat_group_is_cut_into_equal_parts(numels, ranks, align):
    named = {str(number): numel for number, numel in enumerate(numels)}
    group = flat_group(named, ranks, multiple=2 * ranks, align=align)
    row = [(name, element) for name, each in group.items() for element in range(each.length)]
    assert len(row) % (2 * ranks) == 0
    part = len(row) // ranks
    for name, each in group.items():
        assert together(each) == [*range(named[name])]
        assert row.index((name, 0)) % align == 0 if each.length else True
        for rank in range(ranks):
            mine = [element for other, element in row[part * rank :][:part] if other == name]
            assert [*each.of(rank)] == [element for element in mine if element < each.numel]
            assert each.padded(rank) == len(mine)


@pytest.mark.parametrize(("layout", "held", "padded"), [
    (whole(5), [range(5), range(5), range(5)], [5, 5, 5]),
    (flat(5, 3), [range(2), range(2, 4), range(4, 5)], [2, 2, 2]),
    (flat(5, 2), [range(3), range(3, 5), range(3)], [3, 3, 3]),
])  # fmt: skip
def test_groups_are_ranks_in_a_row(layout, held, padded):
    assert [layout.of(rank) for rank in range(3)] == held
    assert [layout.padded(rank) for rank in range(3)] == padded


@given(shape=SHAPES, holders=RANKS, slices=st.integers(2, 4))
def test_slices_and_their_shards_make_the_full_tensor(shape, holders, slices):
    """Neighboring ranks have different slices, and the ranks with the same one divide it."""
    layout = rows(shape, holders)._replace(slices=slices)
    ranks = range(holders * slices)
    assert sorted(chain.from_iterable(map(layout.of, ranks))) == [*range(layout.numel * slices)]
    assert {layout.of(rank).start // max(1, layout.numel) for rank in ranks if layout.of(rank)} <= {*range(slices)}
    for rank in ranks:
        assert len(layout.of(rank)) == len(rows(shape, holders).of(rank // slices))
