"""Bytes that a rank holds and sends under DeepSpeed. Pure: imports neither torch nor deepspeed.

Persistent state is exact (tests/ranks/test_footprint.py counts it on real ranks). The sources, all DeepSpeed 0.19.8,
below runtime/:

- Floating parameters are cast to the compute dtype, frozen ones too (engine.py, `_cast_module_mixed_precision`).
- Stage 0 in 16 bits keeps whole fp32 master weights (fp16/unfused_optimizer.py); in one dtype there are none.
- At stages 1 and 2 each rank has master weights and state of an equal part of each flat group, also in fp32
  (zero/stage_1_and_2.py, `flatten_dense_tensors_aligned`).
- The second copy of hpZ has its own shard of each parameter, from its first release in a window to the update; that of
  a frozen one stays (zero/partition_parameters.py, `_partition_param_sec`; zero/stage3.py,
  `invalidate_secondary_tensor`).
- Stage 3 keeps all gradient shards and one bucket of `reduce_bucket_size` elements (zero/stage3.py,
  `_setup_for_real_optimizer`).
- With an offloaded optimizer, fp32 gradients, and at stages 1 and 2 copies of the parameters and one buffer of the
  largest parameter, stay in host memory (`initialize_optimizer_states`, `param_buffer_of_bit16_for_cpu_offload_groups`,
  `temp_grad_buffer_for_cpu_offload`). Stage 2 sums whole gradients there, also in a window of one micro-batch: it
  counts backwards over all windows (`accumulated_grads_in_cpu`, `micro_step_id`).
- Flags by which unishard's ranks tell each other which parameters they used, a byte each, are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from unishard.config import Config
from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.contract.footprint import Bytes, Collective, Footprint, Working, state_by_parameter
from unishard.contract.model_shape import ModelShape
from unishard_deepspeed import fields
from unishard_deepspeed.footprint.stage3_footprint import Stage3Footprint
from unishard_deepspeed.footprint.stage_footprint import RESERVED, StageFootprint


def footprint_of(shape: ModelShape, cfg: Config, topology: Topology, native: Native) -> Footprint:
    """What a rank holds and sends; between steps all ranks hold the same, unless stage 2 offloads gradients that it
    sums in the dtype of compute.

    Args:
        shape: The model.
        cfg: What to run.
        topology: The ranks.
        native: The native config of `translate`.
    """
    kinds: dict[int, type[StageFootprint]] = {0: _Stage0, 1: _Stage12, 2: _Stage12, 3: Stage3Footprint}
    return kinds[fields.stage(cfg)](shape, cfg, topology, native).footprint()


class _Stage0(StageFootprint):
    """Everything on every rank."""

    def footprint(self) -> Footprint:
        bare = fields.bare(self.cfg)
        gradients = self.numel * self.accumulate
        wide = self.numel * self.master if self.accumulate != self.master else 0
        bucket = min(self.numel, 500_000_000) * self.reduce
        earlier, (*units, root) = gradients if self.micro > 1 else 0, self.whole_gradients(sum)
        traffic = Collective("all_reduce", "gradients", "step", self.numel * self.reduce, self.world)
        return Footprint(
            parameters=Bytes(
                sum(parameter.numel * self.element(parameter) for parameter in self.shape.parameters if parameter.numel)
            ),
            masters=Bytes(0 if bare else self.numel * self.master),
            optimizer=Bytes(state_by_parameter(self.cfg, self.trainable, self.matrices, self.layout, self.rank)),
            gradients=Bytes(gradients),
            kept_gradients=Bytes(),
            buffers=Bytes(self.model_buffers()),
            gathered=bucket,
            forward=Working(begin=earlier, end=earlier),
            backward=Working(root, (0,) * len(units), tuple(units), earlier, gradients),
            final=gradients,
            step=gradients + max(wide, bucket),
            traffic=((traffic,) if self.world > 1 else ()) + self.exchanged(),
            reserved=RESERVED,
        )


class _Stage12(StageFootprint):
    """ZeRO-1 and ZeRO-2: whole parameters, and a part of the flat master weights."""

    @cached_property
    def flat(self) -> int:
        """Bytes of the flat groups."""
        return sum(self.layout[each.name].length * self.element(each) for each in self.trainable)

    @cached_property
    def reached(self) -> int:
        """Elements of all parameters of which some lie in this rank's parts, each in full."""
        return sum(each.numel for each in self.trainable if self.layout[each.name].of(self.rank))

    def footprint(self) -> Footprint:
        part, largest = sum(self.parts), max((parameter.numel for parameter in self.trainable), default=0)
        wide = fields.wide(self.cfg)
        held = (part if wide else self.reached) * self.accumulate
        kept, host, scratch = Bytes(), 0, 0
        if self.offloads:
            kept = Bytes(host=part * self.master)
            if fields.stage(self.cfg) == 2 and not wide:
                kept += Bytes(host=self.reached * self.compute)  # `accumulated_grads_in_cpu`
            host, scratch = part * self.compute + largest * self.compute, largest * self.compute
        late = fields.stage(self.cfg) == 1
        whole = self.numel * (self.accumulate if wide else self.compute) if late else 0
        elements = max(1, min(int(self.zero["reduce_bucket_size"]), self.numel))
        # The first gradient allocates the bucket, or both with overlap_comm; the root's loss is computed before.
        bucket = elements * max(map(self.element, self.trainable), default=0) * (2 if self.zero["overlap_comm"] else 1)
        cast = elements * (self.reduce + self.compute) if self.reduce != self.compute else 0
        earlier = 0 if self.micro == 1 else whole if late else held
        *units, root = self.whole_gradients(sum if late else max)
        return Footprint(
            parameters=Bytes(self.flat + self.whole_frozen()),
            masters=self.place(part * self.master),
            optimizer=self.place(self.state()),
            gradients=kept if self.offloads else Bytes(max(held, whole)),
            kept_gradients=kept,
            buffers=Bytes(self.model_buffers() + scratch, host),
            gathered=bucket + cast,
            forward=Working(begin=earlier, end=earlier),
            backward=Working(root, (bucket,) * len(units), tuple(units), earlier, whole if late else earlier),
            final=bucket + cast + (whole if late else held),
            step=(0 if self.offloads else held + (part * self.master if self.accumulate != self.master else 0)),
            traffic=(*self._traffic(), *self.exchanged()),
            reserved=RESERVED,
        )

    def _traffic(self) -> Iterator[Collective]:
        if self.ranks > 1:
            late = fields.stage(self.cfg) == 1
            times = 1 if late else self.micro
            yield Collective(
                "all_reduce", "gradients", "step" if late else "backward", self.numel * self.reduce * times, self.ranks
            )
            yield Collective("all_gather", "parameters", "step", self.flat, self.ranks)
        yield from self.between_groups(sum(self.parts), self.accumulate)
