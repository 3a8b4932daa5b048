"""What the footprints of DeepSpeed's stages have in common. Pure: imports neither torch nor deepspeed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property

from unishard.config import Config
from unishard.config.nested import Native
from unishard.config.shard_groups import shard_group_size
from unishard.config.topology import Topology
from unishard.contract.footprint import Bytes, Collective, Footprint, exchanged, optimizer_state
from unishard.contract.kit.parameter_groups import groups_of, matrices_of
from unishard.contract.model_shape import ITEMSIZE, ModelShape, ParameterShape, itemsize
from unishard.distributed.layout import Layout
from unishard_deepspeed import fields
from unishard_deepspeed.footprint.intervals import layout_of

RESERVED = (1.05, 1.4)
"""Buckets are allocated once; stage 3's gathers have many sizes. A rule of thumb, not measured here."""


class StageFootprint(ABC):
    """What the stages have in common."""

    def __init__(self, shape: ModelShape, cfg: Config, topology: Topology, native: Native) -> None:
        precision = cfg.precision
        self.shape, self.cfg, self.native = shape, cfg, native
        self.zero = native["zero_optimization"]
        self.world = topology.world_size
        self.rank = topology.rank
        self.ranks = shard_group_size(cfg, topology)
        """Ranks that share one copy."""
        self.compute, self.master = ITEMSIZE[precision.compute], ITEMSIZE[precision.master]
        self.reduce, self.accumulate = ITEMSIZE[precision.reduce], ITEMSIZE[precision.accumulate]
        self.micro = cfg.training.gradient_accumulation_steps
        self.offloads = cfg.offload.optimizer != "none"
        self.trainable = [parameter for parameter in shape.trainable if parameter.numel]
        self.numel = sum(parameter.numel for parameter in self.trainable)

    @cached_property
    def groups(self) -> list[list[ParameterShape]]:
        """The trainable parameters by group of the optimizer, each flattened by itself; slices, and those kept in fp32,
        have groups of their own.
        """
        named = {parameter.name: parameter for parameter in self.trainable}
        groups = [
            [named[name] for name in group.names]
            for group in groups_of(self.cfg.optimizer, list(named), matrices=self.matrices)
        ]
        kind = {name: (each.kept(self.cfg.precision), each.slices) for name, each in named.items()}
        parts = [
            [each for each in group if kind[each.name] == own] for own in sorted({*kind.values()}) for group in groups
        ]
        return [part for part in parts if part]

    def element(self, parameter: ParameterShape) -> int:
        """Bytes of an element of a parameter as the model holds it."""
        if parameter.kept(self.cfg.precision):
            return ITEMSIZE["fp32"]
        if fields.bare(self.cfg) or self.cfg.precision.compute == "fp32" or not parameter.floating:
            return self.master if parameter.trainable else itemsize(parameter.dtype)
        return self.compute

    def whole_frozen(self) -> int:
        """Bytes of the frozen parameters, each in full."""
        return sum(parameter.numel * self.element(parameter) for parameter in self.shape.frozen)

    @cached_property
    def matrices(self) -> frozenset[str]:
        """The names of the parameters that are updated as matrices."""
        return matrices_of(self.cfg.optimizer, self.trainable)

    @cached_property
    def parts(self) -> list[int]:
        """Elements of this rank's part of each group, padding included."""
        return [sum(map(self.padded, group)) for group in self.groups]

    def state(self) -> int:
        """Bytes of the optimizer state of these."""
        are = [group[0].name in self.matrices for group in self.groups]
        layouts = [self.layout[each.name] for each in self.trainable]
        return optimizer_state(self.cfg, zip(self.parts, are, strict=True), layouts, self.rank)

    @cached_property
    def layout(self) -> Mapping[str, Layout]:
        """Which rank holds what of the master weights."""
        groups = [[each.name for each in group] for group in self.groups]
        return layout_of(self.shape, self.cfg, self.ranks, groups, self.zero)

    def padded(self, parameter: ParameterShape) -> int:
        """Elements of this rank's shard, padding included."""
        return self.layout[parameter.name].padded(self.rank)

    def exchanged(self) -> tuple[Collective, ...]:
        """The exchange of matrices with their owners, once a step."""
        matrices = (parameter for parameter in self.trainable if parameter.name in self.matrices)
        return exchanged(self.cfg, matrices, self.ranks)

    def model_buffers(self) -> int:
        """Bytes of the model's buffers after `prepare`."""
        cast = self.cfg.precision.buffers
        sizes = (
            ITEMSIZE[cast] if cast != "keep" and each.floating else itemsize(each.dtype) for each in self.shape.buffers
        )
        return sum(buffer.numel * size for buffer, size in zip(self.shape.buffers, sizes, strict=True))

    def place(self, size: int) -> Bytes:
        """Where what belongs to the optimizer is kept."""
        return Bytes(host=size) if self.offloads else Bytes(size)

    @abstractmethod
    def footprint(self) -> Footprint:
        """All of it."""

    def whole_gradients(self, of_unit: Callable[[list[int]], int]) -> list[int]:
        """Bytes of the whole gradients of each unit, and last of the root, in the dtype of compute.

        Args:
            of_unit: How many of a unit there are at once: `sum` or `max`.
        """
        trained = [
            [each.numel for each in unit if each.trainable and not each.replicated] for unit in self.shape.by_unit
        ]
        return [of_unit([*numels, 0]) * self.compute for numels in trained]

    def between_groups(self, numel: int, dtype: int) -> Iterator[Collective]:
        """The average over groups that each hold a copy, once a step."""
        if (groups := self.world // self.ranks) > 1:
            yield Collective("all_reduce", "gradients", "step", numel * dtype, groups, self.ranks)
