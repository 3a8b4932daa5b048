"""DeepSpeed's optimizer of sharded optimizer state and gradients (runtime/zero/stage_1_and_2.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unishard.contract.kit.kept_fp32 import is_kept
from unishard.contract.private_api import PrivateApi
from unishard.distributed.shards import Shard
from unishard.distributed.slices import holders_of, of_full
from unishard_deepspeed.masters.flat_master_weights import Shards
from unishard_deepspeed.masters.inner_optimizer import InnerOptimizer
from unishard_deepspeed.private.building import keep_adagrad
from unishard_deepspeed.private.clipping import EngineClipping
from unishard_deepspeed.private.reduction import call_before, create_hooks
from unishard_deepspeed.private.slices import named_as_moe
from unishard_deepspeed.private.table import OF_STAGES_1_2
from unishard_deepspeed.private.zero_optimizer import Clipping, ZeroOptimizer, never_invalid
from unishard_deepspeed.spec import ZeroSpec

_ELEMENTS_AT_ONCE = 2**25
"""Elements of a host gradient to copy to the device at a time."""


@final
class Stages12(ZeroOptimizer):
    """`DeepSpeedZeroOptimizer`: each rank holds an interval of a flat master weight for each group."""

    cases = OF_STAGES_1_2

    def __init__(self, spec: ZeroSpec, engine: Any, inner: InnerOptimizer) -> None:
        super().__init__(spec, engine, inner)
        if any(map(is_kept, inner.trained)):
            # Its buffers have the dtype of the first parameter, and would round gradients in fp32 (setup_buckets).
            self.optimizer._gradient_reduction_buffer_dtype = lambda: torch.float32

    @classmethod
    @contextmanager
    def building(cls, model: nn.Module, inner: InnerOptimizer) -> Iterator[None]:
        """With the groups of slices."""
        with keep_adagrad(inner.optimizer), named_as_moe(model, inner.optimizer, cls.cases.slices):
            yield

    def average_between(self, group: Any) -> None:
        """After what `engine.step()` calls first (runtime/engine.py)."""
        finalize = self.optimizer.finalize_gradient_accumulation_boundary

        def finalize_averaged() -> None:
            finalize()
            if self.optimizer.cpu_offload:
                self._average_offloaded(group)
            else:
                self._average(group)

        self.optimizer.finalize_gradient_accumulation_boundary = finalize_averaged

    def _average(self, group: Any) -> None:
        for gradients in self.optimizer.averaged_gradients.values():
            flat = getattr(gradients, "flat_partition", None)
            if flat is not None:
                dist.all_reduce(flat, dist.ReduceOp.AVG, group)
                continue
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat, dist.ReduceOp.AVG, group)
            for gradient, chunk in zip(
                gradients, torch.split(flat, [gradient.numel() for gradient in gradients]), strict=True
            ):
                gradient.copy_(chunk.view_as(gradient))

    def _average_offloaded(self, group: Any) -> None:
        optimizer = self.optimizer
        for master, parameters in zip(
            optimizer.single_partition_of_fp32_groups, optimizer.params_in_partition, strict=True
        ):
            _average_on_host(master.grad, group, optimizer.bit16_groups_flat[0].device)
            for parameter in parameters:
                number = optimizer.get_param_id(parameter)
                _, _, start, numel = optimizer.grad_position[number]
                optimizer.norm_for_param_grads[number] = master.grad.narrow(0, int(start), int(numel)).double().norm()

    def reduce_last(self, parameters: Sequence[nn.Parameter]) -> None:
        """Stage 1 reduces all gradients at the end of a window, and only lacks those that are missing."""
        optimizer, last = self.optimizer, set(parameters)
        groups = {each: index for index, group in enumerate(optimizer.bit16_groups) for each in group if each in last}
        if optimizer.partition_gradients:
            create_hooks(optimizer, optimizer.create_gradient_handling_hooks, last)
            reduce = partial(_reduce, optimizer, parameters, groups)
            call_before(optimizer, "independent_gradient_partition_epilogue", reduce)
        else:
            call_before(optimizer, "reduce_gradients", partial(_fill, optimizer, parameters, groups))

    def gradient_shards(self) -> dict[nn.Parameter, Shard]:
        """Intervals of flat gradients."""
        optimizer, ranks = self.optimizer, self.optimizer.dp_process_group
        parts = {parameter: _empty_shard(parameter, ranks) for parameter in self.inner.trained}
        for index, group in enumerate(optimizer.params_in_partition):
            if optimizer.cpu_offload:
                intervals = [self._offloaded_gradient(parameter) for parameter in group]
            else:
                # As in get_grad_norm_direct: padding between parameters is marked; padding at the end has no parameter.
                intervals = [
                    values
                    for values in optimizer.averaged_gradients[index]
                    if not getattr(values, "_zero_padding", False)
                ]
            for parameter, values in zip(group, intervals, strict=False):
                parts[parameter] = _shard(parameter, values.detach().view(-1), _start_of(parameter), ranks)
        return parts

    def _offloaded_gradient(self, parameter: nn.Parameter) -> Tensor:
        group, _, start, numel = self.optimizer.grad_position[self.optimizer.get_param_id(parameter)]
        values: Tensor = self.optimizer.single_partition_of_fp32_groups[group].grad.view(-1).narrow(0, start, numel)
        return values

    def measure_offloaded(self) -> None:
        """An overflow is found while gradients are copied to the host."""
        optimizer = self.optimizer
        optimizer.local_overflow = False
        for group in optimizer.params_in_partition:
            for parameter in group:
                values = self._offloaded_gradient(parameter)
                optimizer.norm_for_param_grads[optimizer.get_param_id(parameter)] = values.double().norm(2)
                optimizer.update_offload_overflow_tracker(values)

    def drop_shards(self) -> None:
        """Also what a backward that has raised an error leaves."""
        optimizer = self.optimizer
        optimizer.zero_grad()
        optimizer.micro_step_id = -1  # INITIAL_MICRO_STEP_ID
        optimizer._offload_accumulated_param_ids = set()
        optimizer._epilogue_ran_this_backward = False
        optimizer.params_already_reduced = [False] * len(optimizer.params_already_reduced)
        for bucket in optimizer.ipg_buckets.values():
            bucket.clear()
        for gradients in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
            for index in gradients:
                gradients[index] = None
        optimizer.reset_cpu_buffers()

    def stale(self) -> dict[PrivateApi, Callable[[], None]]:
        """What it leaves in the master weights (_finalize_cpu_offload_gradient_accumulation); also the sums, to which
        it adds the gradient of a parameter that the first micro-batch of a window does not use
        (async_accumulate_grad_in_cpu_via_gpu), and after a skipped update the averages, so that all later updates are
        skipped as well.
        """
        return {self.cases.stale_offloaded: self._clear_offloaded} if self.spec.offloads_optimizer else {}

    def _clear_offloaded(self) -> None:
        for master in self.optimizer.single_partition_of_fp32_groups:
            if master.grad is not None:
                master.grad.zero_()
        self.optimizer.averaged_gradients.clear()
        for total in self.optimizer.accumulated_grads_in_cpu.values():
            total.zero_()

    def clipping(self) -> Clipping:
        """By DeepSpeed."""
        return EngineClipping(self)

    @contextmanager
    def without_overflow_check(self) -> Iterator[list[bool]]:
        """Another check comes before that of the norm."""
        self.optimizer.check_overflow = lambda partition_gradients=True: None
        try:
            with never_invalid(self.optimizer) as answers:
                yield answers
        finally:
            del self.optimizer.check_overflow

    def shards_of_masters(self) -> Shards:
        """By DeepSpeed's own mapping (utils/tensor_fragment.py), which is None where other ranks hold all of it."""
        shards: dict[Tensor, dict[nn.Parameter, range]] = {}
        for parameter in self.inner.trained:
            mapping = parameter._hp_mapping  # type: ignore[attr-defined]
            if mapping is not None and mapping.hp_fragment_address.numel:
                start, numel = mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel
                in_master = shards.setdefault(self.masters[mapping.param_group_index], {})
                in_master[parameter] = range(start, start + numel)
        return shards

    def master_shard(self, parameter: Any) -> Shard:
        """An interval of a flat master weight."""
        self.cases.master_weights.require()
        if not hasattr(parameter, "_hp_mapping"):
            return of_full(parameter, Shard(parameter.shape, parameter.detach()))
        ranks = self.optimizer.dp_process_group
        if parameter._hp_mapping is None:
            return _empty_shard(parameter, ranks, self.masters[0].dtype)
        return _shard(parameter, parameter._hp_mapping.hp_fragment.detach(), _start_of(parameter), ranks)

    def copy_masters(self) -> None:
        """By DeepSpeed."""
        self.optimizer.update_lp_params()

    def unlink_states(self) -> None:
        """They are in its mapping (utils/tensor_fragment.py)."""
        for parameter in self.inner.trained:
            mapping = parameter._hp_mapping  # type: ignore[attr-defined]
            if mapping is not None:
                mapping.optim_fragment = None

    def link_states(self, *, now: bool) -> None:
        """By default DeepSpeed does so only after the first update."""
        self.optimizer._hp_optimizer_states_linked = False
        if now:
            self.optimizer._lazy_init_hp_params_optimizer_state()
            self.optimizer._hp_optimizer_states_linked = False


def _reduce(optimizer: Any, parameters: Sequence[nn.Parameter], groups: dict[nn.Parameter, int]) -> None:
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.process_gradients(parameter, groups[parameter])


def _fill(optimizer: Any, parameters: Sequence[nn.Parameter], groups: dict[nn.Parameter, int]) -> None:
    """Create zeros for missing gradients, which DeepSpeed otherwise omits when it reduces all at the end of a
    window.
    """
    for parameter in parameters:
        if optimizer.get_gradient_for_reduction(parameter) is None:
            parameter.grad = torch.zeros_like(parameter)
            optimizer.process_gradients(parameter, groups[parameter])


def _average_on_host(gradient: Tensor, group: Any, device: torch.device) -> None:
    """Average a host gradient over a group, through a buffer on the device if there is one, because NCCL needs device
    tensors.
    """
    if device.type == "cpu":
        dist.all_reduce(gradient, dist.ReduceOp.AVG, group)
        return
    torch.cuda.synchronize(device)  # DeepSpeed copies gradients to the host without waiting
    for chunk in torch.split(gradient, _ELEMENTS_AT_ONCE):
        on_device = chunk.to(device)
        dist.all_reduce(on_device, dist.ReduceOp.AVG, group)
        chunk.copy_(on_device)


def _start_of(parameter: Any) -> int:
    start: int = parameter._hp_mapping.lp_fragment_address.start  # utils/tensor_fragment.py
    return start


def _empty_shard(parameter: nn.Parameter, ranks: Any, dtype: torch.dtype = torch.float32) -> Shard:
    return _shard(parameter, torch.empty(0, dtype=dtype, device=parameter.device), 0, ranks)


def _shard(parameter: nn.Parameter, values: Tensor, start: int, ranks: Any) -> Shard:
    return of_full(parameter, Shard(parameter.shape, values, start, holders_of(parameter) or ranks))
