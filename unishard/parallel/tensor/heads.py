"""Attention whose projections are cut: whole heads for each rank, and the attributes that count them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from unishard.errors import ModelError
from unishard.parallel.tensor.cutter import Cutter

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KEYS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_OF_KEYS = ("k_proj", "v_proj")
_GROUPS = "num_key_value_groups"
"""Heads of queries for each of keys and values, which transformers repeats so often."""


class Attention(NamedTuple):
    """A module that makes heads of what its projections return."""

    heads: int
    keys: int
    """Key and value heads."""


class Heads:
    """Of the attentions of a model."""

    def __init__(self, cutter: Cutter, modules: Mapping[str, nn.Module]) -> None:
        self._cutter, self._modules = cutter, modules
        self._divided: dict[str, Attention] = {}

    def divide(self, name: str, features: int) -> slice | None:
        """Let the attention count the heads of this rank, if the projection `name` belongs to one.

        Returns:
            The features that this rank uses of a projection to keys or values that stays whole, as it has fewer heads
            than there are ranks; None of one that is cut.

        Raises:
            ModelError: The size does not divide the heads.
        """
        for above in _above(name):
            attention = self._divided.get(above) or _attention(self._modules.get(above))
            if attention is not None:
                if above not in self._divided:
                    self._divide(above, attention)
                    self._divided[above] = attention
                return self._used(attention, name, features)
        return None

    def _divide(self, name: str, attention: Attention) -> None:
        (heads, keys), size, module = attention, self._cutter.groups.size, self._modules[name]
        if heads % size or (keys % size and size % keys):
            raise ModelError(
                f"parallel.tensor is {size}, which does not fit the {heads} heads and {keys} key and value heads of "
                f"{name} ({type(module).__name__}); choose a size that divides the heads, and divides the key and "
                "value heads or is a multiple of them"
            )
        own_heads, own_keys = heads // size, max(1, keys // size)
        counts = dict.fromkeys(_HEADS, own_heads) | dict.fromkeys(_KEYS, own_keys) | {_GROUPS: own_heads // own_keys}
        for attribute, count in counts.items():
            if isinstance(vars(module).get(attribute), int):
                self._cutter.set(module, attribute, count)

    def _used(self, attention: Attention, name: str, features: int) -> slice | None:
        groups = self._cutter.groups
        if name.removesuffix(".linear").rpartition(".")[2] not in _OF_KEYS or attention.keys % groups.size == 0:
            return None
        width, head = features // attention.keys, groups.number * attention.keys // groups.size
        return slice(head * width, (head + 1) * width)


def _above(name: str) -> Iterator[str]:
    """The modules around one, also where it is inside another one that stands for it."""
    parent = name.rpartition(".")[0]
    yield parent
    yield parent.rpartition(".")[0]


def _attention(module: Any) -> Attention | None:
    if module is None:
        return None
    own = vars(module)
    heads, keys = (
        next((own[each] for each in names if isinstance(own.get(each), int)), None) for names in (_HEADS, _KEYS)
    )
    if heads is None and _GROUPS in own:
        heads = module.config.num_attention_heads
    if heads is None:
        return None
    return Attention(heads, heads // own[_GROUPS] if own.get(_GROUPS) else keys or heads)
