"""Bytes of stage 3: shards of each parameter, gathered by unit. Pure: imports neither torch nor deepspeed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property

from unishard.contract.footprint import Bytes, Collective, Footprint, Working
from unishard.contract.model_shape import ParameterShape
from unishard_deepspeed import fields
from unishard_deepspeed.footprint.stage_footprint import RESERVED, StageFootprint
from unishard_deepspeed.second_copy import group_of


class Stage3Footprint(StageFootprint):
    """ZeRO-3: shards of each parameter, gathered by unit."""

    @cached_property
    def group(self) -> int | None:
        """Ranks that keep a second copy of what was gathered, until the update if it is trainable."""
        return group_of(self.zero, self.ranks)

    def footprint(self) -> Footprint:
        """See `StageFootprint.footprint`."""
        masters, kept = sum(self.parts) * self.master, sum(self.parts) * self.accumulate
        held = sum(self.padded(parameter) * self.element(parameter) for parameter in self.shape.parameters)
        held += sum(map(self._copy, self.shape.frozen))
        bucket = max(1, min(int(self.zero["reduce_bucket_size"]), self.numel)) * self.reduce
        whole = sum(map(self._whole, self.shape.replicated))
        late = sum(each.numel for each in self.shape.replicated if each.trainable) * self.compute
        offloads_parameters = self.cfg.offload.params != "none"
        gradients = self.place(kept + (masters if self.offloads else 0))
        (*units, root), kept_whole = self._gathered(), self._kept()
        stays = 0 if self._releases else kept_whole
        *made, _ = self.whole_gradients(sum)
        copies = 0 if offloads_parameters else sum(map(self._copy, self.trainable))
        return Footprint(
            parameters=Bytes(whole, held) if offloads_parameters else Bytes(held + whole),
            masters=self.place(masters),
            optimizer=self.place(self.state()),
            gradients=gradients,
            kept_gradients=gradients,
            buffers=Bytes(self.model_buffers() + bucket),
            gathered=max((root, *units)),
            forward=Working(root, tuple(units), (), copies if self.micro > 1 else 0, kept_whole + copies),
            backward=Working(root, tuple(units), tuple(made), kept_whole + copies, stays + copies + late),
            final=2 * bucket + max(self._sizes(self._full)[-1:]) + copies + late,
            step=(0 if self.offloads else masters) + copies,
            traffic=(*self._traffic(), *self.exchanged()),
            reserved=RESERVED,
        )

    def _sizes(self, measure: Callable[[ParameterShape], int]) -> list[int]:
        return [sum(map(measure, unit)) for unit in self.shape.by_unit]

    def _full(self, parameter: ParameterShape) -> int:
        """Bytes of a parameter that is gathered and freed, padding included."""
        return 0 if parameter.replicated else self._whole(parameter)

    def _whole(self, parameter: ParameterShape) -> int:
        """Bytes of a whole parameter, padding included."""
        return self.layout[parameter.name].length * self.element(parameter)

    def _copy(self, parameter: ParameterShape) -> int:
        """Bytes of this rank's shard of the second copy."""
        return self._full(parameter) // self.group if self.group else 0

    @property
    def _releases(self) -> bool:
        return self.cfg.sharding.reshard_after_forward is not False

    def _gathered(self) -> list[int]:
        """Gathered parameters while each unit computes, and last the root, with what is gathered ahead; without what
        stays.
        """
        full = self._sizes(self._full)
        limit = int(self.zero["stage3_prefetch_bucket_size"])
        numels = self._sizes(lambda parameter: 0 if parameter.replicated else parameter.numel)
        ahead = (max(numels) if limit == fields.UNLIMITED else limit) * self.compute
        return [size + min(ahead, sum(full) - size) if self._releases else 0 for size in full]

    def _kept(self) -> int:
        """Gathered parameters of the forward that stay for the backward.

        Where nothing is released, all. Else those of linear layers, of which autograd saves views unless the layer is
        recomputed: DeepSpeed 0.19.8 gives a released parameter other storage instead of freeing this one
        (runtime/zero/partition_parameters.py, free_param). DeepSpeed's own linear (memory_efficient_linear, off in
        unishard) saves none. The first unit has the embedding, whose backward needs none.
        """
        full = self._sizes(self._full)
        if not self._releases:
            return sum(full)
        recomputes = not self.cfg.activation_checkpointing == self.cfg.offload.activations == "none"
        return 0 if recomputes or self.zero.get("memory_efficient_linear") else sum(full[1:])

    def _traffic(self) -> Iterator[Collective]:
        if self.ranks > 1:
            yield from self._gathers(sum(self._sizes(self._full)), again=bool(self.cfg.sharding.reshard_after_forward))
            if whole := sum(map(self._whole, self.shape.replicated)):
                yield Collective("all_gather", "parameters", "step", whole, self.ranks)
            sent = sum(self.parts) * self.ranks * self.reduce * self.micro
            yield Collective("reduce_scatter", "gradients", "backward", sent, self.ranks)
        yield from self.between_groups(sum(self.parts), self.accumulate)

    def _prefetched(self) -> int:
        """Bytes that are gathered ahead for backward when forward ends, and kept: of the last unit, and of what follows
        it.
        """
        limit, last = int(self.zero["stage3_prefetch_bucket_size"]), len(self.shape.units) - 1
        unit = [place for place, parameter in enumerate(self.shape.parameters) if parameter.unit == last]
        if last < 0 or not unit or limit < sum(self.shape.parameters[place].numel for place in unit):
            return 0
        return sum(self._full(parameter) for place, parameter in enumerate(self.shape.parameters) if place >= unit[0])

    def _gathers(self, full: int, *, again: bool) -> Iterator[Collective]:
        """The all-gathers of a step: with a second copy among all ranks only the first, and only of what is
        trainable.
        """
        backward = full - self._prefetched() if again else 0
        first = sum(map(self._full, self.trainable)) if self.group else full * self.micro
        yield Collective("all_gather", "parameters", "forward", first, self.ranks)
        near = self.group or self.ranks
        if rest := full * self.micro - first:
            yield Collective("all_gather", "parameters", "forward", rest, near)
        if backward:
            yield Collective("all_gather", "parameters", "backward", backward * self.micro, near)
