"""What a backend says of memory and traffic before a run: what one rank holds and sends. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal, NamedTuple, Self

from unishard.config import Config, Optimizer, Parallel
from unishard.config.topology import Topology
from unishard.contract.model_shape import ITEMSIZE, ModelShape, ParameterShape
from unishard.distributed.layout import Layout

Phase = Literal["forward", "backward", "step"]


class Bytes(NamedTuple):
    """Bytes on one rank, by where they are."""

    device: int = 0
    """Memory of the accelerator."""
    host: int = 0
    """Host memory, for offloading."""
    files: int = 0
    """Files of `offload: nvme`."""

    def __add__(self, other: object) -> Self:
        if not isinstance(other, Bytes):
            return NotImplemented
        return type(self)(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def moved(self, to_files: bool) -> Self:
        """The same with host memory in files, if it is to lie there."""
        return self._replace(host=0, files=self.files + self.host) if to_files else self

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


class Collective(NamedTuple):
    """The collectives of one kind in one optimizer step."""

    kind: Literal["all_gather", "reduce_scatter", "all_reduce", "reduce", "broadcast", "all_to_all"]
    what: Literal["parameters", "gradients", "activations"]
    phase: Phase
    nbytes: int
    """Bytes of the full tensors, of an all-to-all those on one rank, over all micro-batches of a step."""
    ranks: int
    """Ranks in the process group."""
    stride: int = 1
    """Distance of neighbors in the group: 1 for ranks in a row."""

    def sent(self) -> int:
        """Bytes that one rank sends, by the ring algorithms of NCCL: an all-reduce is a reduce-scatter and an
        all-gather.
        """
        once = self.nbytes * (self.ranks - 1) // self.ranks
        return 2 * once if self.kind == "all_reduce" else once

    def between_nodes(self, per_node: int) -> int:
        """Bytes of these that go to another node: of the neighbors in a ring on one node, one sends to the next node.

        Args:
            per_node: Ranks on one node.
        """
        beside = max(1, min(self.ranks, per_node // self.stride))
        return self.sent() // beside if self.ranks > beside else 0


class Working(NamedTuple):
    """Device bytes beyond the persistent ones in forward or backward, activations excluded. What comes and goes with
    the units that are done does so evenly.
    """

    root: int = 0
    """While the root computes."""
    units: tuple[int, ...] = ()
    """While each unit computes; as while the root does where there are none."""
    made: tuple[int, ...] = ()
    """Whole gradients of each unit once its activations are gone."""
    begin: int = 0
    """What else there is as the phase begins."""
    end: int = 0
    """The same as it ends, such as gradients of the units that are done."""

    def at(self, unit: int, share: float) -> tuple[int, int]:
        """Those while a unit computes, or the root (-1), when this share of the phase is over; and once the activations
        of the unit are gone.
        """
        beside = self.units[unit] if unit >= 0 and self.units else self.root
        beside += int(self.begin + share * (self.end - self.begin))
        return beside, beside + (self.made[unit] if unit >= 0 and self.made else 0)

    @property
    def most(self) -> int:
        """No more than these."""
        return max(self.root, max(self.units, default=0) + max(self.made, default=0)) + max(self.begin, self.end)

    def plus(self, begin: int, end: int) -> Self:
        """With more from its begin to its end."""
        return self._replace(begin=self.begin + begin, end=self.end + end)


_NOTHING = Working()


@dataclass(frozen=True)
class Footprint:
    """What one rank holds and sends in an optimizer step.

    Bytes of tensors; not of the allocator, the CUDA context and NCCL.
    """

    parameters: Bytes
    """The parameters between steps, in the dtype that the engine keeps; padding included, as in all fields."""
    masters: Bytes
    """Master weights in memory of their own; 0 where the parameters are the master weights."""
    optimizer: Bytes
    """Optimizer state after the first step."""
    gradients: Bytes
    """Gradients at the end of the last backward, before the step."""
    kept_gradients: Bytes
    """The part of `gradients` whose memory stays allocated between steps."""
    buffers: Bytes
    """The model's buffers, and those that the engine allocates once for its collectives and copies."""
    gathered: int = 0
    """The most device bytes that gathered parameters and the buffers of collectives take at once, kept ones
    excluded."""
    forward: Working = _NOTHING
    """In the last micro-batch of a step."""
    backward: Working = _NOTHING
    """Likewise."""
    final: int = 0
    """Device bytes beyond the persistent ones when all activations are gone, at the end of the last backward."""
    step: int = 0
    """The same in the step; gradients included."""
    traffic: tuple[Collective, ...] = ()
    reserved: tuple[float, float] = (1.0, 1.0)
    """By what the allocator multiplies the peak: from, to."""
    notes: tuple[str, ...] = field(default=())
    """What these figures leave out."""

    def in_files(self, cfg: Config) -> Footprint:
        """The same with what `nvme` keeps in files, where the engine knows only host memory.

        Args:
            cfg: What to run.
        """
        weights, optimizer = cfg.offload.params == "nvme", self.optimizer.moved(cfg.offload.optimizer == "nvme")
        tensors, _ = optimizer_tensors(
            cfg.optimizer.name, amsgrad=cfg.optimizer.amsgrad, momentum=cfg.optimizer.momentum
        )
        size = ITEMSIZE[cfg.precision.master]
        if cfg.optimizer.name == "adamw_8bit":  # its codes; the scales stay in memory
            scales, size = optimizer.files * 4 // (_BLOCK + 4), 1
            optimizer += Bytes(host=scales, files=-scales)
        in_memory = PIECES_IN_MEMORY * min(optimizer.files, PIECE * tensors * size)
        return replace(
            self,
            parameters=self.parameters.moved(weights),
            masters=self.masters.moved(weights),
            optimizer=optimizer,
            buffers=self.buffers + Bytes(host=in_memory),
        )

    @property
    def persistent(self) -> Bytes:
        """What stays allocated between steps."""
        return self.parameters + self.masters + self.optimizer + self.kept_gradients + self.buffers

    @property
    def parts(self) -> Mapping[str, Bytes]:
        """The categories that are not activations, by name."""
        return MappingProxyType(
            {
                "parameters": self.parameters,
                "master weights": self.masters,
                "gradients": self.gradients,
                "optimizer state": self.optimizer,
                "buffers": self.buffers,
            }
        )


FootprintOf = Callable[[ModelShape, Config, Topology], Footprint]
PIECES_IN_MEMORY, PIECE = 3, 2**23
"""Of a state in files: how many pieces are in memory at a time, and the elements of one."""
_THERE_AND_BACK: tuple[Literal["gradients", "parameters"], ...] = ("gradients", "parameters")
_FROM_SIZE, _BLOCK = 4096, 256
"""Elements from which on a parameter has moments of 8 bits, and those of a block with a scale (bitsandbytes 0.50)."""


def optimizer_state(cfg: Config, tensors: Iterable[tuple[int, bool]], layouts: Iterable[Layout], rank: int) -> int:
    """Bytes of the optimizer's state on one rank.

    Args:
        cfg: The optimizer, and the dtype of the master weights, which its state has too.
        tensors: Of each stepped tensor its elements, and whether it is updated as a matrix, or as several.
        layouts: Of each trained parameter: `adamw_8bit` keeps its state by parameter.
        rank: Which one.
    """
    optimizer, size = cfg.optimizer, ITEMSIZE[cfg.precision.master]
    count, rest = optimizer_tensors(optimizer.name, amsgrad=optimizer.amsgrad, momentum=optimizer.momentum)
    if optimizer.name == "adamw_8bit":
        held = [(each.numel < _FROM_SIZE, each.of(rank)) for each in layouts if each.of(rank)]
        return sum(
            count * len(own) * size + rest if small else count * (len(own) + 4 * _blocks(own)) for small, own in held
        )
    # Of a matrix Muon keeps only the momentum.
    return sum(numel * size if matrix else numel * count * size + rest for numel, matrix in tensors)


def state_by_parameter(
    cfg: Config,
    parameters: Iterable[ParameterShape],
    matrices: Collection[str],
    layout: Mapping[str, Layout],
    rank: int,
) -> int:
    """The same where each parameter's shard is stepped by itself.

    Args:
        cfg: The optimizer, and the dtype of the master weights.
        parameters: Those that train.
        matrices: The names of those that are updated as matrices.
        layout: Which elements of each the ranks hold.
        rank: Which one.
    """
    trained = [(each.name, layout[each.name]) for each in parameters]
    tensors = ((len(cut.of(rank)), name in matrices) for name, cut in trained)
    return optimizer_state(cfg, tensors, (cut for _, cut in trained), rank)


def _blocks(held: range) -> int:
    """How many blocks of a parameter have elements among these."""
    return held[-1] // _BLOCK - held[0] // _BLOCK + 1


def exchanged(cfg: Config, matrices: Iterable[ParameterShape], ranks: int) -> tuple[Collective, ...]:
    """What an optimizer of matrices sends in a step: shards of gradients to owners, and shards of updates back.

    Args:
        cfg: The optimizer.
        matrices: Those that it updates.
        ranks: That share one copy; more share a slice, where nothing else is sharded.
    """
    elements: dict[int, int] = {}
    for each in matrices:
        sharing = max(ranks, each.slices)
        elements[sharing] = elements.get(sharing, 0) + each.numel * each.slices
    return tuple(
        Collective("all_to_all", what, "step", count * ITEMSIZE[cfg.optimizer.ns_dtype] // sharing, sharing)
        for sharing, count in elements.items()
        if sharing > 1
        for what in _THERE_AND_BACK
    )


def optimizer_tensors(name: str, *, amsgrad: bool = False, momentum: float = 0.0) -> tuple[int, int]:
    """State of an optimizer of the config: tensors in the shape of a stepped tensor, and bytes of its other ones.

    torch 2.13, optim/adam.py, adagrad.py: `step` is a tensor of one fp32 element, and SGD's momentum has none;
    lion-pytorch 0.2 has one moment and no step.
    """
    match name:
        case "adamw" | "adam" | "muon" | "adamw_8bit":
            return 3 if amsgrad else 2, 4
        case "adagrad":
            return 1, 4
        case "lion":
            return 1, 0
        case _:
            return (1 if momentum else 0), 0


def with_slices(footprint_of: FootprintOf, shape: ModelShape, cfg: Config, topology: Topology) -> Footprint:
    """What one rank holds and sends, where it has slices of some parameters: they travel among those with the same.

    Args:
        footprint_of: A backend's, whose traffic takes all parameters for full ones.
        shape: The model.
        cfg: What to run.
        topology: The ranks, and which of them this is.

    Raises:
        ConfigError: As `footprint_of`.
    """
    footprint = footprint_of(shape, cfg, topology)
    sizes = sorted({each.slices for each in shape.parameters})
    if sizes == [1]:
        return footprint
    traffic = [each for each in footprint.traffic if each.kind == "all_to_all"]  # of matrices: among all that share one
    for slices in sizes:
        holders = replace(
            topology,
            world_size=topology.world_size // slices,
            local_world_size=max(1, topology.local_world_size // slices),
            rank=topology.rank // slices,
            local_rank=0,
        )
        own = tuple(replace(each, slices=1) for each in shape.parameters if each.slices == slices)
        sharded = footprint_of(replace(shape, parameters=own), _without_parts(cfg, slices), holders)
        traffic += [each._replace(stride=each.stride * slices) for each in sharded.traffic if each.kind != "all_to_all"]
    return replace(footprint, traffic=tuple(traffic))


def _without_parts(cfg: Config, slices: int) -> Config:
    """A config of as many ranks fewer, each with all of the model and no matrices to exchange; groups of ranks that
    share one copy shrink, too.
    """
    group = cfg.sharding.group_size
    sharding = cfg.sharding.model_copy(update={"group_size": group and group // slices})
    training = cfg.training.model_copy(update={"global_batch_size": None})
    optimizer = Optimizer() if cfg.optimizer.name == "muon" else cfg.optimizer
    changed = {"parallel": Parallel(), "sharding": sharding, "training": training, "optimizer": optimizer}
    return cfg.model_copy(update=changed)
