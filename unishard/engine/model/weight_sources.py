"""Where the tensors of a transformers model lie in its files.

A tensor may be there under another name, or in several tensors that transformers joins or divides as it loads them,
such as the experts of a mixture.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unishard.contract.kit.materialization import Reader
from unishard.errors import ModelError

TensorReader = Callable[[str, int, int], Tensor]
"""Reads the elements between two offsets of a flattened tensor of the files."""


class WeightSource(NamedTuple):
    """What a tensor of the model is read from."""

    origin: str
    shape: tuple[int, ...]
    read: Reader


def sources_of(model: Any, shapes: Mapping[str, tuple[int, ...]], read: TensorReader) -> dict[str, WeightSource]:
    """Map names in the model to tensors in the files by transformers' rules, without those that it ignores.

    Args:
        model: A transformers model.
        shapes: Of the tensors in the files.
        read: Reads one of them.

    Raises:
        ModelError: transformers cannot make a tensor of the model from these.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    state = model.state_dict()
    rename: Callable[..., tuple[str, str | None]] = partial(
        rename_source_key, base_model_prefix=model.base_model_prefix, meta_state_dict=state
    )
    ignored = _ignored(model)
    sources: dict[str, WeightSource] = {}
    assembled: dict[str, _Assembly] = {}
    for key in sorted(shapes, key=dot_natural_key):  # the order in which experts are stacked
        name, pattern = rename(key, renamings, converters)
        if name not in state and key in state:
            name, pattern = rename(key, [], [])
        if pattern is not None and name in state:
            assembled.setdefault(name, _Assembly(by_pattern[pattern], name, {})).keys.setdefault(pattern, []).append(
                key
            )
        elif name in state or not any(re.search(each, name) for each in ignored):
            sources[name] = WeightSource(key, shapes[key], partial(read, key))
    like = SimpleNamespace(
        config=model.config,
        get_parameter={key: torch.empty_like(each, device="meta") for key, each in state.items()}.get,
    )
    for assembly in assembled.values():
        sources |= assembly.sources(like, type(model).__name__, shapes, read)
    return sources


def _ignored(model: Any) -> list[str]:
    """Names in a file that transformers ignores (transformers 5.23, modeling_utils.py,
    _adjust_missing_and_unexpected_keys).
    """
    return [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"]


class _Assembly(NamedTuple):
    """Tensors of the files that transformers converts together."""

    converter: Any
    first: str
    """The tensor of the model; the first one, where there are several."""
    keys: dict[str, list[str]]
    """Tensors of the files by the pattern that they match."""

    def sources(
        self, like: Any, kind: str, shapes: Mapping[str, tuple[int, ...]], read: TensorReader
    ) -> Iterator[tuple[str, WeightSource]]:
        """What transformers makes of the tensors, by its own operations on the meta device."""
        keys = [key for each in self.keys.values() for key in each]
        origin = keys[0] if len(keys) == 1 else f"{keys[0]} with {len(keys) - 1} more"
        try:
            made = self._converted(like, lambda key: torch.empty(shapes[key], device="meta"))
        except Exception as error:  # whatever the operations of a model raise
            operations = ", ".join(map(repr, self.converter.operations))
            raise ModelError(
                f"transformers cannot make {self.first} of {kind} from {origin} by {operations} "
                f"({str(error) or type(error).__name__:.200}); copy the whole directory again, or load the model "
                "inside unishard.init(cfg) with cls.from_pretrained, which needs the full model on rank 0"
            ) from error

        def whole(key: str) -> Tensor:
            return read(key, 0, math.prod(shapes[key])).view(shapes[key])

        for name, tensor in made.items():
            rows = len(tensor) if self._by_rows(len(tensor)) else 1
            size = tensor.numel() // max(rows, 1)

            def part(begin: int, end: int, name: str = name, size: int = size, rows: int = rows) -> Tensor:
                first, last = begin // size, -(-end // size)
                tensor = self._converted(like, whole, slice(first, last) if rows > 1 else slice(None))[name]
                return tensor.reshape(-1)[begin - first * size : end - first * size]

            yield name, WeightSource(origin, tuple(tensor.shape), part)

    def _by_rows(self, rows: int) -> bool:
        """Whether each row is made of one tensor of each pattern, so that a part needs only its own experts."""
        from transformers.core_model_loading import Concatenate, MergeModulelist

        stack, *rest = self.converter.operations
        return (
            isinstance(stack, MergeModulelist)
            and stack.dim == 0
            and all(isinstance(each, Concatenate) and each.dim > 0 for each in rest)
            and all(len(each) == rows for each in self.keys.values())
        )

    def _converted(self, like: Any, tensor_of: Callable[[str], Tensor], rows: slice = slice(None)) -> dict[str, Tensor]:
        converter = deepcopy(self.converter)
        for pattern, keys in self.keys.items():
            for key in keys[rows]:
                converter.add_tensor(self.first, key, pattern, partial(tensor_of, key))
        made = converter.convert(self.first, model=like, config=like.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}
