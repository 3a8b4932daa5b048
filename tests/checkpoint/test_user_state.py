"""What a user saves comes back as it was, through JSON and tensors alone."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import random
from collections import OrderedDict, namedtuple
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from stored import store
from torch import Tensor, nn

from unishard.checkpoint import manifest
from unishard.checkpoint.hashing import hash_of, hexadecimal
from unishard.checkpoint.tensor_reader import Tensors
from unishard.checkpoint.user_state import once, pack, unpack
from unishard.checkpoint.verifying import damaged, hashes_of
from unishard.distributed.storable import STORABLE
from unishard.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

numbers = st.integers() | st.integers(2**53, 2**70) | st.floats()
scalars = st.none() | st.booleans() | numbers | st.text() | st.binary(max_size=9)
keys = scalars | st.tuples(st.integers(), st.text())
LAYOUTS = {
    "contiguous": lambda plain: plain,
    "transposed": lambda plain: plain.mT if plain.dim() > 1 else plain,
    "strided": lambda plain: plain[..., ::2] if plain.dim() else plain,
    "expanded": lambda plain: plain[:1].expand(3, *plain.shape[1:]) if plain.dim() and len(plain) else plain,
    "overlapping": lambda plain: plain.reshape(-1).as_strided((2, 2), (1, 1)) if plain.numel() > 2 else plain,
    "conjugate": torch.conj,
    "negated": lambda plain: plain.conj().imag if plain.dtype in (torch.complex64, torch.complex128) else plain,
}
EVERY = sorted(STORABLE, key=str)


def laid_out(dtype: torch.dtype, layout: str, shape: Any) -> Tensor:
    return LAYOUTS[layout](torch.arange(math.prod(shape)).reshape(shape).to(dtype))


@st.composite
def tensors(draw: Any) -> Tensor:
    return laid_out(
        draw(st.sampled_from(EVERY)),
        draw(st.sampled_from(sorted(LAYOUTS))),
        draw(st.lists(st.integers(0, 3), max_size=3)),
    )


arrays_ = arrays.arrays(
    st.sampled_from(["f8", "i4", "u2", "?"]), arrays.array_shapes(min_dims=0, min_side=0, max_side=3)
)
states = st.recursive(
    scalars | tensors() | arrays_,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=4)
        | st.dictionaries(st.sampled_from(["$tensor", "$items", "a.b", "a"]), inner)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


def test_two_states_of_one_checkpoint_share_no_name():
    first, second = (pack({"a": torch.ones(1)}, prefix)[1] for prefix in ("state.", "data.rank00001."))
    assert [*first, *second] == ["state.a", "data.rank00001.a"]


def there_and_back(state: Any) -> Any:
    value, held = pack(state)
    assert all(name.startswith("state.") for name in held)
    return unpack(json.loads(json.dumps(value, allow_nan=False)), held.__getitem__)


def same(one: Any, other: Any) -> bool:
    """Equal, of the same types, and not a number where the other is none."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and hash_of(one) == hash_of(other)
    if isinstance(one, np.ndarray):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
        )
    if isinstance(one, dict):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one.items(), other.items(), strict=True))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or (one, math.copysign(1, one)) == (
            other,
            math.copysign(1, other),
        )
    return bool(one == other)


@settings(max_examples=60)
@given(states)
def test_every_state_comes_back_from_a_checkpoint_that_is_sound(state):
    with TemporaryDirectory() as folder:
        value, held = pack(state)
        facts = store(Path(folder), {"model.a.weight": torch.ones(2)} | held, state=value)
        assert same(unpack(manifest.read(Path(folder)).state, Tensors(Path(folder)).full), state)
        assert damaged(Path(folder), facts) == hashes_of(Path(folder), facts) == []


@pytest.mark.parametrize("dtype", EVERY, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_dtype_in_every_layout_comes_back_bit_by_bit(tmp_path, dtype, layout):
    value = laid_out(dtype, layout, (4, 6))
    facts = store(tmp_path, {"model.a.weight": torch.ones(2), "state.x": value})
    assert same(Tensors(tmp_path).full("state.x"), value)
    assert facts.tensors["state.x"].hash == hexadecimal(hash_of(value.clone()))
    assert damaged(tmp_path, facts) == hashes_of(tmp_path, facts) == []


def fits(state: Any) -> bool:
    try:
        return bool(pack(state))
    except CheckpointError:
        return False


WRAPS = [
    lambda inner: (inner,),
    lambda inner: [inner],
    lambda inner: {7: inner},
    lambda inner: {"a": inner},
    lambda inner: {"$": (inner,)},
]


@pytest.mark.parametrize("seed", range(12))
def test_what_is_nested_as_deep_as_can_be_saved_comes_back(tmp_path, seed):
    chosen = iter([WRAPS[seed]] * 101 if seed < len(WRAPS) else random.Random(seed).choices(WRAPS, k=101))
    deep, deeper = None, [torch.ones(1)]
    while fits(deeper):
        deep, deeper = deeper, next(chosen)(deeper)
    with pytest.raises(CheckpointError, match="is nested deeper than 100 levels"):
        pack(deeper)
    value, held = pack(deep)
    store(tmp_path, {"model.a.weight": torch.ones(2)} | held, state=value)
    found = manifest.read(tmp_path)
    assert same(unpack(found.state, Tensors(tmp_path).full), deep)
    assert manifest.read(tmp_path).model_dump()["state"] == value, "and the command line can show it"


@given(
    st.recursive(
        numbers | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text().filter(lambda key: key[:1] != "$"), inner),
    )
)
def test_readers_that_know_doubles_only_can_read_the_numbers(state):
    value, held = pack(state)
    assert held == {}
    json.loads(
        json.dumps(value, allow_nan=False),
        parse_int=lambda digits: pytest.fail(digits) if abs(int(digits)) > 2**53 else int(digits),
    )


def test_the_json_is_what_the_page_says():
    value, held = pack({"epoch": 3, "best": math.inf, "seen": {7: "x"}, "ema": {"w": torch.ones(2)}, "shape": (1, 2)})
    assert value == {
        "epoch": 3,
        "best": {"$float": "inf"},
        "seen": {"$items": [[7, "x"]]},
        "ema": {"w": {"$tensor": "state.ema.w"}},
        "shape": {"$tuple": [1, 2]},
    }
    assert list(held) == ["state.ema.w"]


def test_an_optimizer_and_a_scheduler_come_back():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    scheduler.step()
    assert same(there_and_back(optimizer.state_dict()), optimizer.state_dict())
    state = scheduler.state_dict()
    assert same(there_and_back(state), state)


def test_paths_that_are_spelled_alike_name_two_tensors():
    state = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, 0: torch.full((1,), 2.0), "0": torch.full((1,), 3.0)}
    assert same(there_and_back(state), state)


def test_what_becomes_something_plainer():
    parameter = nn.Parameter(torch.ones(2))
    back = there_and_back(
        {"ordered": OrderedDict(a=1), "scalar": np.float32(0.5), "flag": np.bool_(True), "weight": parameter}
    )
    assert same(back, {"ordered": {"a": 1}, "scalar": 0.5, "flag": True, "weight": torch.ones(2)})
    assert not back["weight"].requires_grad
    assert there_and_back(torch.ones(2)).tolist() == [1, 1]
    assert there_and_back(np.arange(6).reshape(2, 3).T[::-1]).tolist() == [[2, 5], [1, 4], [0, 3]]


@dataclasses.dataclass
class Settings:
    lr: float = 0.1


class Color(enum.StrEnum):
    RED = "red"


Point = namedtuple("Point", "x y")
itself: list[Any] = []
itself.append(itself)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {"run": [1, Settings()]},
            "state.run.1 is a Settings, which is neither JSON nor a tensor; save a dict, list, tuple",
        ),
        ({"ema": nn.Linear(1, 1)}, r"state.ema is a Linear, .*; save its state_dict\(\) instead"),
        ({1, 2}, "state.value is a set,"),
        ({"c": Color.RED}, "state.c is a Color,"),
        ({"p": Point(1, 2)}, "state.p is a Point,"),
        ({"z": 1j}, "state.z is a complex,"),
        ({"f": print}, "state.f is a builtin_function_or_method,"),
        ({"a": {Color.RED: 1}}, "state.a has a key that is Color, .*; save a string or number instead"),
        ({"a": np.array(["x"])}, "state.a is of <U1 in a ndarray, .*; save an array of numbers"),
        ({"a": np.array([1], dtype=">i4")}, "state.a is of >i4 in a ndarray,"),
        ({"a": np.longdouble(1)}, "state.a is a longdouble,"),
        ({"a": torch.eye(2).to_sparse()}, "state.a is torch.sparse_coo, which cannot be saved; save a dense tensor"),
        ({"a": torch.ones(2, device="meta")}, "state.a is on the meta device, which cannot be saved"),
        (
            {"a": torch.empty(2, dtype=torch.uint4)},
            "state.a is torch.uint4, which cannot be saved; .* of another dtype",
        ),
        ({"a": torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)}, "state.a is torch.jagged, which"),
        ({"a": np.ma.masked_array([1], [True])}, "state.a is a MaskedArray, .*; save its data and its mask"),
        ({"a": "\ud800"}, "state.a: .* lone surrogate"),
        ({"a": {"\ud800": 1}}, "state.a: .* lone surrogate"),
        (itself, "state.0.0.0.0.0... is nested deeper than 100 levels, or contains itself"),
    ],
)
def test_what_cannot_be_saved_is_refused_with_its_place_and_what_instead(state, message):
    with pytest.raises(CheckpointError, match=message):
        pack(state)


NONSENSE = [
    {"$tensor": ["float32", [10**18]]},
    {"$tensor": ["float32", [0, -1]]},
    {"$tensor": ["uint4", [0]]},
    {"$tensor": [1]},
    {"$tensor": None},
    {"$array": ["complex32", [0]]},
    {"$json": "{"},
    {"$json": "[" * 10**6},
    {"$json": 1},
    {"$float": []},
]


@pytest.mark.parametrize(
    "value", [{"$new": 1}, {"$int": "no"}, {"$items": 3}, {"$items": [1]}, {"$tuple": 3}, *NONSENSE]
)
def test_json_of_another_version_is_refused(value):
    with pytest.raises(CheckpointError, match="which this version cannot decode"):
        unpack({"a": [value]}, dict[str, Tensor]().__getitem__)


def test_a_state_refers_to_no_tensor_twice() -> None:
    packed, held = pack({"a": torch.ones(2), "b": [torch.ones(2), b"x"]})
    assert unpack(packed, once(held.__getitem__))["b"][1] == b"x"
    name = next(iter(held))
    with pytest.raises(CheckpointError, match=r"refers to the tensor 'state.a' twice"):
        unpack([{"$tensor": name}] * 2, once(held.__getitem__))
