"""Inputs are cast in every container that people pass, and the containers stay what they are."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pack_sequence

from unishard.distributed.nested_tensors import cast

Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True)
class Held:
    table: torch.Tensor
    count: int


def low(value: object) -> object:
    return cast(value, torch.bfloat16)


def test_tensors_inside_containers() -> None:
    x, ids = torch.ones(2), torch.arange(2)
    found = low([x, (ids, {"a": x}), Pair(x, ids), OrderedDict(b=x), Held(x, 3)])
    assert (
        found[0].dtype
        == found[1][1]["a"].dtype
        == found[2].first.dtype
        == found[3]["b"].dtype
        == found[4].table.dtype
        == torch.bfloat16
    )
    assert found[1][0] is found[2].second is ids
    assert [type(each) for each in found[1:]] == [tuple, Pair, OrderedDict, Held]
    assert found[4].count == 3
    assert x.dtype == torch.float32


def test_mappings_keep_their_class_and_what_else_they_carry() -> None:
    encoding, counted = UserDict(x=torch.ones(1)), defaultdict(list, x=torch.ones(1))
    encoding.encodings = "kept"
    found, other = low(encoding), low(counted)
    assert (type(found), found.encodings, found["x"].dtype) == (UserDict, "kept", torch.bfloat16)
    assert (other["new"], other["x"].dtype) == ([], torch.bfloat16)
    assert encoding["x"].dtype == counted["x"].dtype == torch.float32


def test_packed_sequences() -> None:
    assert low(pack_sequence([torch.ones(2)])).data.dtype == torch.bfloat16
    whole = pack_sequence([torch.arange(2)])
    assert low(whole) is whole


def test_what_holds_nothing_to_cast_is_the_same_object() -> None:
    for value in (
        "text",
        None,
        3,
        Held,
        {"a": 1},
        [torch.arange(2)],
        (1, 2),
        torch.ones(1, dtype=torch.bfloat16),
        Held(torch.arange(1), 1),
    ):
        assert low(value) is value
