"""Bytes that a rank holds and sends under PyTorch's own data parallelism. Pure: imports no torch.

Persistent state is exact (tests/ranks/test_footprint.py counts it on real ranks). The sources, all torch 2.13:

- `fully_shard` (distributed/fsdp/_fully_shard/_fsdp_param.py, `_init_sharded_param`) pads every shard to the first
  one, so each rank holds ceil(rows / ranks) rows in memory. The optimizer's state has the shape of the rows without
  padding.
- The gradients of a unit are views of one output of its reduce-scatter, padded in the same way (`_fsdp_collectives.py`,
  `foreach_reduce`).
- A unit is gathered in the compute dtype, padded, and its all-gather's output is copied out
  (`foreach_all_gather_copy_out`). The output is kept until the next unit has been copied out in forward
  (`_fsdp_param_group.py`, `wait_for_unshard`).
- With a smaller group after forward, a unit's shard there is freed by its gather in backward, and kept instead if there
  is none: nothing before the first trainable parameter has a backward. The unit's next forward replaces it
  (`_fsdp_param.py`, `to_sharded_post_forward`, `to_unsharded`, which frees nothing once `to_sharded` has been called).
- One input of a reduce-scatter is kept until that of the next unit is made (`reduce_scatter_max_input_buffers`, 1).
- DistributedDataParallel with `gradient_as_bucket_view` keeps all gradients in its buckets, which stay between steps
  (csrc/distributed/ c10d/reducer.cpp, `initialize_buckets`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate, takewhile

from unishard.config import Config
from unishard.config.nested import Native
from unishard.config.shard_groups import shard_group_size
from unishard.config.topology import Topology
from unishard.contract.footprint import Bytes, Collective, Footprint, Working, exchanged, state_by_parameter
from unishard.contract.kit.parameter_groups import matrices_of
from unishard.contract.model_shape import ITEMSIZE, ModelShape, ParameterShape, itemsize
from unishard_fsdp.footprint.parameter_size import own_size
from unishard_fsdp.footprint.replicated_footprint import beside
from unishard_fsdp.footprint.rows import layout_of

RESERVED = (1.05, 1.3)
"""The allocator keeps blocks of the units' sizes for each stream. A rule of thumb, not measured here: FSDP2 frees in
order, unlike FSDP1, of which OpenTau 273 reports 43.9 GB allocated and 70.1 GB reserved."""


def footprint_of(shape: ModelShape, cfg: Config, topology: Topology, native: Native) -> Footprint:
    """What the rank of the topology holds and sends.

    Args:
        shape: The model.
        cfg: What to run.
        topology: The ranks, and this one.
        native: The native config of `translate`.
    """
    ranks, matrices = shard_group_size(cfg, topology), matrices_of(cfg.optimizer, shape.trainable)
    if native["data_parallel"] == "DistributedDataParallel":
        return _ddp(shape, cfg, topology, native, matrices)
    if native["data_parallel"] == "replicate":
        return _Sharded(shape, cfg, topology, native, ranks, matrices).footprint()
    sharded = _Sharded(shape.without_replicated(), cfg, topology, native, ranks, matrices)
    return beside(sharded.footprint(), shape, cfg, topology, native, matrices)


def _buffers(shape: ModelShape, cfg: Config) -> int:
    """Bytes of the model's buffers after `prepare`."""
    cast = cfg.precision.buffers
    return sum(
        buffer.numel * (ITEMSIZE[cast] if cast != "keep" and buffer.floating else itemsize(buffer.dtype))
        for buffer in shape.buffers
    )


class _Sharded:
    """`fully_shard` over groups of `ranks`; of one rank it replicates."""

    def __init__(
        self,
        shape: ModelShape,
        cfg: Config,
        topology: Topology,
        native: Native,
        ranks: int,
        matrices: Collection[str],
    ) -> None:
        """Of what is sharded.

        Args:
            shape: What is sharded of the model.
            cfg: What to run.
            topology: The ranks, and this one.
            native: The native config of `translate`.
            ranks: Of a group.
            matrices: Names of the parameters that are updated as matrices.
        """
        self._layout, self._matrices = layout_of(shape, ranks), matrices
        self._shape, self._cfg, self._topology, self._native, self._ranks = shape, cfg, topology, native, ranks
        self._compute = native["mp_policy"]["param_dtype"]
        self._reduce = itemsize(native["mp_policy"]["reduce_dtype"] or self._compute or "float32")
        self._waits = native["requires_gradient_sync"] == "last_micro_batch"

    def footprint(self) -> Footprint:
        shape, cfg = self._shape, self._cfg
        offloads = self._native.get("offload_policy") is not None
        on_host = self._native.get("host_optimizer") is not None
        place = (lambda size: Bytes(host=size)) if offloads else Bytes
        master = ITEMSIZE[cfg.precision.master]
        rank, layout, matrices = self._topology.rank, self._layout, self._matrices
        own = sum(len(layout[parameter.name].of(rank)) for parameter in shape.trainable)
        parameters = sum(
            layout[parameter.name].padded(rank) * own_size(parameter, cfg) for parameter in shape.parameters
        )
        gradients = sum(layout[parameter.name].padded(rank) for parameter in shape.trainable) * master
        state = state_by_parameter(cfg, shape.trainable, matrices, layout, rank)
        forward, backward, final = self._working(0 if offloads else gradients)
        return Footprint(
            parameters=place(parameters),
            masters=Bytes(host=own * master) if on_host else Bytes(),
            optimizer=Bytes(host=state) if on_host or cfg.offload.optimizer == "nvme" else place(state),
            gradients=place(gradients),
            kept_gradients=Bytes(),
            buffers=Bytes(
                _buffers(shape, cfg) + self._post_forward(sum(self._sizes(self._full)[: self._without_backward()]))
            ),
            gathered=max((forward.root, *forward.units)) + max(self._sizes(self._reduced)),
            forward=forward,
            backward=backward,
            final=final,
            step=0 if offloads else gradients,
            traffic=(
                *self._traffic(),
                *exchanged(cfg, (each for each in shape.trainable if each.name in matrices), self._ranks),
            ),
            reserved=RESERVED,
        )

    def _sizes(self, measure: Callable[[ParameterShape], int]) -> list[int]:
        """A measure of each unit, and last of the root; FSDP2 under `replicate` has units too, which it frees
        together.
        """
        return [sum(map(measure, unit)) for unit in self._shape.by_unit]

    def _full(self, parameter: ParameterShape) -> int:
        """Bytes of a gathered parameter, padding included."""
        cast = self._compute and parameter.floating and not parameter.kept(self._cfg.precision)
        size = itemsize(self._compute) if cast else own_size(parameter, self._cfg)
        return self._layout[parameter.name].length * size

    def _reduced(self, parameter: ParameterShape) -> int:
        """Bytes of a parameter in the input of the reduce-scatter."""
        return self._layout[parameter.name].length * self._reduce if parameter.trainable else 0

    def _in_backward(self, sizes: Sequence[int]) -> list[int]:
        """Of what is gathered of each unit, what backward gathers again."""
        skipped = frozenset() if self._native.get("unshard_embeddings_in_backward", True) else self._shape.embeddings
        return [0 if index in skipped else size for index, size in enumerate(sizes)]

    def _post_forward(self, gathered: int) -> int:
        """Bytes that stay of gathered parameters until backward: nothing, or a shard in a smaller group."""
        group = self._native.get("reshard_after_forward")
        return 0 if isinstance(group, bool) or not group else gathered // group

    def _without_backward(self) -> int:
        """The first so many units, before which and in which nothing is trainable: their outputs need no gradient.

        Parameters are in the order of their modules, those of the root among them.
        """
        frozen = [
            parameter.unit for parameter in takewhile(lambda parameter: not parameter.trainable, self._shape.parameters)
        ]
        trained = min(
            (parameter.unit for parameter in self._shape.trainable if parameter.unit >= 0),
            default=len(self._shape.units),
        )
        return min(
            max(frozen, default=-1) + 1, trained, len(self._shape.units) - bool(self._native.get("keep_last_unit"))
        )

    def _ahead(self, units: Sequence[int]) -> int:
        """Bytes of the next units that are gathered before they are used: those within the limit, else the next one
        (torch's prefetch).
        """
        numel = self._native.get("prefetch_numel")
        limit = numel * itemsize(self._compute or "float32") if isinstance(numel, int) else 0
        fitting = [total for total in accumulate(units) if total <= limit]
        return fitting[-1] if fitting else sum(units[:1])

    def _whole(self, parameter: ParameterShape) -> int:
        """Bytes of a whole gradient before it is reduced."""
        return self._full(parameter) if parameter.trainable else 0

    def _working(self, gradients: int) -> tuple[Working, Working, int]:
        """What forward, backward and the end of backward take.

        The root is gathered throughout, and its whole gradients stay to the end. The input of a reduce-scatter stays
        until that of the next.

        Args:
            gradients: Bytes of the gradients' shards on the device.
        """
        (*units, root), (*wholes, whole), (*inputs, input_) = map(self._sizes, (self._full, self._whole, self._reduced))
        micro = self._cfg.training.gradient_accumulation_steps
        earlier = 0 if micro == 1 else sum(inputs) + input_ if self._waits else gradients
        before = [whole + size for size in (*inputs[1:], 0)]
        if self._native["data_parallel"] == "replicate" or not self._native["reshard_after_forward"]:
            kept = 0 if micro == 1 else sum(units)  # only the last micro-batch reshards
            forward = Working(root, (root,) * len(units), (), kept + earlier, sum(units) + earlier)
            held = tuple(root + size for size in before)
            backward = Working(root + whole, held, tuple(wholes), sum(units) + earlier, kept + gradients)
        else:
            needed, last = self._in_backward(units), units[-1] if units and self._native["keep_last_unit"] else 0
            kept = self._post_forward(
                sum(units[self._without_backward() :]) - last
            )  # those of the first are persistent
            ahead = [self._ahead(units[index:]) for index in range(len(units) + 1)]
            held = tuple(root + size + next_ for size, next_ in zip(units, ahead[1:], strict=True))
            forward = Working(root + ahead[0], held, (), earlier, earlier + kept)
            ahead = [self._ahead(needed[:index][::-1]) for index in range(len(units) + 1)]
            held = tuple(root + sum(sizes) for sizes in zip(needed, ahead, before, strict=False))
            backward = Working(root + whole + max(last, ahead[-1]), held, tuple(wholes), earlier + kept, gradients)
        return forward, backward, whole + input_ + max(inputs[:1], default=0) + gradients

    def _traffic(self) -> Iterator[Collective]:
        cfg, native, ranks = self._cfg, self._native, self._ranks
        micro = cfg.training.gradient_accumulation_steps
        groups = self._topology.world_size // ranks
        full = self._sizes(self._full)
        kept = native["data_parallel"] == "replicate" or not native["reshard_after_forward"]
        if ranks > 1:
            once = native["reshard_after_backward"] == "last_micro_batch"
            yield Collective("all_gather", "parameters", "forward", sum(full) * (1 if once else micro), ranks)
            if not kept:
                group = ranks if native["reshard_after_forward"] is True else native["reshard_after_forward"]
                again = self._in_backward(full)[: -2 if native["keep_last_unit"] else -1]
                yield Collective("all_gather", "parameters", "backward", sum(again) * micro, group)
        whole = sum(map(self._reduced, self._shape.trainable))
        times = 1 if self._waits else micro
        if ranks > 1:
            yield Collective("reduce_scatter", "gradients", "backward", whole * times, ranks)
        if groups > 1:
            late = native.get("requires_all_reduce", native["requires_gradient_sync"]) == "last_micro_batch"
            yield Collective(
                "all_reduce", "gradients", "backward", whole // ranks * (1 if late else times), groups, ranks
            )


def _ddp(shape: ModelShape, cfg: Config, topology: Topology, native: Native, matrices: Collection[str]) -> Footprint:
    """Whole parameters, gradients and optimizer state on each rank."""
    parameters = sum(parameter.numel * own_size(parameter, cfg) for parameter in shape.parameters)
    gradients = sum(parameter.numel for parameter in shape.trainable) * ITEMSIZE[cfg.precision.master]
    micro = 1 if native["requires_gradient_sync"] == "last_micro_batch" else cfg.training.gradient_accumulation_steps
    # Without synchronization autograd accumulates beside DDP's buckets, to which the last micro-batch copies (torch
    # 2.13, nn/parallel).
    beside = gradients if micro < cfg.training.gradient_accumulation_steps else 0
    averaged = Collective("all_reduce", "gradients", "backward", gradients * micro, topology.world_size)
    updated = exchanged(cfg, (each for each in shape.trainable if each.name in matrices), 1)
    return Footprint(
        parameters=Bytes(parameters),
        masters=Bytes(),
        optimizer=Bytes(state_by_parameter(cfg, shape.trainable, matrices, layout_of(shape, 1), topology.rank)),
        gradients=Bytes(gradients),
        kept_gradients=Bytes(gradients),
        buffers=Bytes(_buffers(shape, cfg)),
        forward=Working(begin=beside, end=beside),
        backward=Working(begin=beside, end=beside),
        traffic=((averaged,) if topology.world_size > 1 else ()) + updated,
        reserved=RESERVED,
    )
