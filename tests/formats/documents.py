"""Documents of every format, as people write them, and the same broken in every way that people break them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from accounting import FORMATS
from hypothesis import strategies as st

from unishard.contract import registry
from unishard.formats import catalog

Document = dict[str, Any]

SEEDS: Mapping[str, list[Document]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
"""By format."""

_WORDS = """
auto none no yes true false null cpu nvme cuda bf16 fp16 fp32 bfloat16 float16 16-mixed bf16-mixed adamw AdamW Adam SGD Lamb OneBitAdam
cosine linear constant WarmupLR WarmupDecayLR OneCycle FULL_SHARD full_shard HYBRID_SHARD NO_SHARD SHARD_GRAD_OP zero3 1 2 3 FSDP DEEPSPEED
MULTI_GPU NO TRANSFORMER_BASED_WRAP NO_WRAP SIZE_BASED_WRAP fsdp deepspeed_stage_3 ddp 1e-5 5e8 10ba 1ep 0.1 LlamaDecoderLayer LOCAL_MACHINE
inf nan ${x} a.b BACKWARD_POST PURE DEFAULT selective full 500 -1 1_000 0x10 ../x.json
""".split()  # noqa: SIM905
odd_values: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(_WORDS),
    st.sampled_from(
        [None, True, False, 0, 1, 2, 3, -1, 4, 8, 100, 500000000, 2**63, 10**30, 0.0, 0.1, 1.0, 1e-5, -0.5, 5e8, 1e300]
    ),
    st.sampled_from([float("inf"), float("-inf"), float("nan"), "", " ", "ä", "\n", "x" * 300]),
    st.sampled_from(
        [
            [],
            {},
            [1],
            [0.9, 0.999],
            ["A"],
            ["A", 1],
            [[]],
            [{}],
            {"enabled": True},
            {"x": 1},
            {"a.b": 2},
            {"stage": 3},
            "a,b",
            [None],
        ]
    ),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
)


def known_keys(name: str) -> list[str]:
    """Dotted keys of a format, those of the engines where it hands them on."""
    keys = set(catalog.get(name).keys)
    if name == "deepspeed":
        keys |= set(registry.arguments("deepspeed").keys)
    return sorted(keys)


KNOWN = {name: known_keys(name) for name in FORMATS}


def paths_of(data: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Of every mapping and every value in it."""
    for key, value in data.items():
        yield (*above, key)
        if isinstance(value, Mapping):
            yield from paths_of(value, (*above, key))


def put(data: Document, path: tuple[str, ...], value: Any) -> None:
    """Write a value, and mappings around it where there are none."""
    *above, last = path
    for key in above:
        if not isinstance(data.get(key), dict):
            data[key] = {}
        data = data[key]
    data[last] = value


def take(data: Document, path: tuple[str, ...]) -> Any:
    """Remove what stands at a path, and return it."""
    *above, last = path
    for key in above:
        data = data[key]
    return data.pop(last)


@st.composite
def documents(draw: st.DrawFn, name: str) -> Document:
    """A document that a person wrote, with up to six things changed in it."""
    data = copy.deepcopy(draw(st.sampled_from(SEEDS[name])))
    for _ in range(draw(st.integers(0, 6))):
        paths = list(paths_of(data))
        path = draw(st.sampled_from(paths or [("x",)]))
        match draw(st.sampled_from(("replace", "known", "unknown", "remove", "rename", "wrap", "move"))):
            case "replace":
                put(data, path, copy.deepcopy(draw(odd_values)))
            case "known" if KNOWN[name]:
                put(data, tuple(draw(st.sampled_from(KNOWN[name])).split(".")), copy.deepcopy(draw(odd_values)))
            case "unknown":
                put(
                    data,
                    (
                        *path[:-1],
                        draw(st.sampled_from(("stagee", "zero", "a.b", "optimizer.type", "", "1", "ä", "type"))),
                    ),
                    copy.deepcopy(draw(odd_values)),
                )
            case "rename" if path in paths:
                put(data, (*path[:-1], path[-1][:-1]), take(data, path))
            case "wrap" if path in paths:
                put(data, (*path, draw(st.sampled_from(("enabled", "type", "x")))), take(data, path))
            case "move" if path in paths:
                put(data, path[-1:], take(data, path))
            case _ if path in paths:
                take(data, path)
    return data


def reordered(data: Any) -> Any:
    """The same mappings with their keys the other way round."""
    return {key: reordered(value) for key, value in reversed(data.items())} if isinstance(data, Mapping) else data
