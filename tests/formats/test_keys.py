from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unishard.contract.entries import DocumentValues, Key, Unreadable
from unishard.contract.key_rows import boolean, drops, integer, listed, number, one_of, own, refuses, sets, text
from unishard.contract.rules import Fit

NOTHING_GIVEN = DocumentValues({}, {}, None)
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["1e-5", "5e8", "nan", "inf", "1_0", "٣"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@pytest.mark.parametrize(
    ("convert", "value", "meant"),
    [
        (boolean, True, True),
        (boolean, "no", False),
        (boolean, " ON ", True),
        (boolean, 0, False),
        (number(0), "1e-5", 1e-5),
        (number(0, 1), 1, 1.0),
        (integer(1), 5e8, 500_000_000),
        (integer(1), "5e8", 500_000_000),
        (integer(), "9007199254740993", 9007199254740993),
        (integer(), 10**30, 10**30),
        (text, "x", "x"),
        (listed, "A, B,", ["A", "B"]),
        (listed, ["A ", "B"], ["A", "B"]),
        (one_of({"bf16": "bf16", "no": "fp32"}), "BF16", "bf16"),
        (one_of({"1": "full"}), 1, "full"),
    ],
)
def test_values_as_people_write_them(convert: Callable[[Any], Any], value: Any, meant: Any) -> None:
    found = convert(value)
    assert found == meant
    assert type(found) is type(meant)


@pytest.mark.parametrize(
    ("convert", "value", "what"),
    [
        (boolean, "maybe", "must be true or false, got 'maybe'; write one of the two"),
        (boolean, 2, "must be true or false, got 2; write one of the two"),
        (number(0), -1, "must be a number of at least 0, got -1; write one"),
        (number(0, 1), "x", "must be a number from 0 to 1, got 'x'; write one"),
        (number(), math.nan, "must be a number, got nan; write one"),
        (number(), True, "must be a number, got true; write one"),
        (number(), 10**400, "must be a number, got 0x1b4"),  # hexadecimal, as Python refuses to print long ones
        (integer(1), 0, "must be a whole number of at least 1, got 0; write one"),
        (integer(), 1.5, "must be a whole number, got 1.5; write one"),
        (integer(), math.inf, "must be a whole number, got inf; write one"),
        (text, "  ", "must be text, got '  '; write some"),
        (listed, 3, "must be a list of names, got 3; write [A, B]"),
        (listed, ["A", 3], "must be a list of names, got [A, 3]; write [A, B]"),
        (listed, ",", "must name something; remove the key or write a name"),
        (one_of({"a": 1, "b": 2}), "c", "must be one of a, b, got 'c'; write one of them"),
    ],
)
def test_values_that_a_key_cannot_have(convert: Callable[[Any], Any], value: Any, what: str) -> None:
    with pytest.raises(Unreadable) as caught:
        convert(value)
    assert str(caught.value).startswith(what)
    assert ";" in str(caught.value)


@given(anything)
def test_every_reader_takes_or_refuses_whatever_it_is_given(value: Any) -> None:
    for convert in (boolean, number(0, 1), integer(1), text, listed, one_of({"a": 1})):
        complaint = "must "
        try:
            convert(value)
        except Unreadable as error:
            complaint = str(error)
        assert complaint.startswith("must ")


@given(st.integers(-(10**30), 10**30))
def test_whole_numbers_stay_whole_as_text(value: int) -> None:
    assert integer()(str(value)) == value == integer()(value)


def test_rows() -> None:
    def effect(row: Key, value: Any) -> Any:
        return row.read(value, NOTHING_GIVEN)

    seed = sets("training.seed", integer(0), Fit.APPROXIMATE, "another generator", copy_verbatim=True)
    assert (seed.fields, seed.fit, seed.note) == (("training.seed",), Fit.APPROXIMATE, "another generator")
    assert effect(seed, 4).fields == {"training.seed": 4}
    assert effect(seed, 4).copy_verbatim
    with pytest.raises(Unreadable):
        effect(seed, "auto")  # a word that only some keys know
    assert effect(drops("logs alone"), 1).fit is Fit.IGNORED
    assert effect(drops("logs alone"), 1).copy_verbatim
    gone = refuses("is gone; remove it", off=lambda value: value is False)
    assert [effect(gone, value).fit for value in (True, False)] == [Fit.UNSUPPORTED, Fit.IGNORED]
    mine = effect(own("deepspeed.zero_optimization.sub_group_size", integer(1), Fit.IGNORED, "memory alone"), "1e9")
    assert mine.native == {"deepspeed.zero_optimization.sub_group_size": 10**9}
    assert (mine.fit, mine.note, mine.fields) == (Fit.IGNORED, "memory alone", {})
