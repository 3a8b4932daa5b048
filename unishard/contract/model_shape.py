"""The shape of a model: all that the memory of its training state depends on. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from unishard.config import Precision

ITEMSIZE: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of an element, by dtypes of a config."""

_SIZES = {
    "float64": 8,
    "int64": 8,
    "complex64": 8,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
}
_SIZES |= {"uint16": 2, "uint64": 8, "complex128": 16, "complex32": 4}


def itemsize(dtype: str) -> int:
    """Bytes of an element of a torch dtype by its name, such as `bfloat16`; 1 for bool and 8-bit types."""
    return _SIZES.get(dtype, 1)


@dataclass(frozen=True, slots=True)
class TensorShape:
    """A parameter or buffer."""

    name: str
    """Its first name in the model."""
    shape: tuple[int, ...]
    dtype: str
    """As in torch without the prefix, such as `float32`."""

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in its own dtype."""
        return self.numel * itemsize(self.dtype)

    @property
    def floating(self) -> bool:
        """Whether an engine may cast it."""
        return self.dtype.startswith(("float", "bfloat"))


@dataclass(frozen=True, slots=True)
class ParameterShape(TensorShape):
    """A parameter."""

    trainable: bool
    unit: int
    """Index in `ModelShape.units`; -1 for the root."""
    fp32_in: tuple[str, ...] = ()
    """The compute dtypes in which the model's class keeps it in fp32."""
    matrix: bool = False
    """Whether it is a matrix for optimizers that know matrices: a weight of a unit, of two or three dimensions."""
    replicated: bool = False
    """Whether every rank holds it whole where others are sharded."""
    slices: int = 1
    """Of how many equal parts of a full tensor it is one: `parallel.expert`."""

    @property
    def full_numel(self) -> int:
        """Elements of the full tensor."""
        return self.numel * self.slices

    def ranks(self, all_ranks: int) -> int:
        """Over how many of the ranks that share one copy it is sharded."""
        return 1 if self.replicated else max(1, all_ranks // self.slices)

    def kept(self, precision: Precision) -> bool:
        """Whether it stays in fp32 under `precision.keep_fp32`."""
        asked = precision.keep_fp32
        if precision.compute == "fp32" or not self.floating:
            return False
        return (
            precision.compute in self.fp32_in
            if asked == "auto"
            else any(re.search(pattern, self.name) for pattern in asked)
        )


@dataclass(frozen=True)
class ModelShape:
    """All that the memory of a model's training state depends on, computed once from a model on the meta device."""

    parameters: tuple[ParameterShape, ...]
    """Each once, as `model.named_parameters()` yields them, with the dtypes that they have before `prepare`."""
    buffers: tuple[TensorShape, ...] = ()
    units: tuple[str, ...] = ()
    """Names of the modules that are gathered together, in module order, without the root."""
    embeddings: frozenset[int] = frozenset()
    """Indices in `units` of tables of embeddings, of which a backward needs no weights."""

    @cached_property
    def trainable(self) -> tuple[ParameterShape, ...]:
        """The trainable parameters."""
        return tuple(parameter for parameter in self.parameters if parameter.trainable)

    @cached_property
    def frozen(self) -> tuple[ParameterShape, ...]:
        """The frozen ones."""
        return tuple(parameter for parameter in self.parameters if not parameter.trainable)

    @cached_property
    def replicated(self) -> tuple[ParameterShape, ...]:
        """Those that every rank holds whole."""
        return tuple(parameter for parameter in self.parameters if parameter.replicated)

    def without_replicated(self) -> ModelShape:
        """The same model without those."""
        return replace(self, parameters=tuple(each for each in self.parameters if not each.replicated))

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    @cached_property
    def by_unit(self) -> tuple[tuple[ParameterShape, ...], ...]:
        """The parameters of each unit, and last those of the root."""
        parameters: list[list[ParameterShape]] = [[] for _ in range(len(self.units) + 1)]
        for parameter in self.parameters:
            parameters[parameter.unit].append(parameter)
        return tuple(map(tuple, parameters))
