"""DeepSpeed's optimizer of sharded parameters (runtime/zero/stage3.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unishard.contract.kit.kept_fp32 import is_kept
from unishard.contract.private_api import PrivateApi
from unishard.distributed.shards import Shard
from unishard_deepspeed.masters.flat_master_weights import FlatMasterWeights, Shards
from unishard_deepspeed.masters.inner_optimizer import InnerOptimizer
from unishard_deepspeed.private import partitioned, slices
from unishard_deepspeed.private.building import keep_adagrad
from unishard_deepspeed.private.clipping import EngineClipping
from unishard_deepspeed.private.reduction import call_before, create_hooks
from unishard_deepspeed.private.table import OF_STAGE_3
from unishard_deepspeed.private.zero_optimizer import Clipping, ZeroOptimizer
from unishard_deepspeed.spec import ZeroSpec


@final
class Stage3(ZeroOptimizer):
    """`DeepSpeedZeroOptimizer_Stage3`: each rank holds a shard of each parameter."""

    cases = OF_STAGE_3
    gathers = True

    def __init__(self, spec: ZeroSpec, engine: Any, inner: InnerOptimizer) -> None:
        super().__init__(spec, engine, inner)
        reduce_units_by_parameter(self.optimizer, inner.trained)
        if torch.cuda.is_available():
            partitioned.free_after_gathers(self.optimizer)

    @classmethod
    @contextmanager
    def building(cls, model: nn.Module, inner: InnerOptimizer) -> Iterator[None]:
        """With a buffer for parameters that stay in fp32, and the groups of slices."""
        slices.name_in_stage_3(model)
        with keep_adagrad(inner.optimizer), _buffers_by_dtype() if any(map(is_kept, inner.trained)) else nullcontext():
            yield

    def average_between(self, group: Any) -> None:
        """Before what `engine.step()` calls first (runtime/engine.py)."""
        call_before(self.optimizer, "finalize_gradient_accumulation_boundary", partial(self._average, group))

    def _average(self, group: Any) -> None:
        optimizer = self.optimizer
        dist.all_reduce(optimizer.grad_partitions_flat_buffer, dist.ReduceOp.AVG, group)
        if optimizer.offload_optimizer:
            # Only these are copied to the host; another group may have used parameters that this one did not.
            trainable = [
                parameter for parameters in optimizer.fp16_groups for parameter in parameters if parameter.requires_grad
            ]
            optimizer._offload_boundary_param_ids.update(
                each.ds_id
                for each in trainable
                if each.partition_numel() * optimizer._get_param_partition_rank(each) < each.ds_numel
            )

    def reduce_last(self, parameters: Sequence[nn.Parameter]) -> None:
        """At the end of each backward."""
        create_hooks(self.optimizer, self.optimizer.create_reduce_and_remove_grad_hooks, set(parameters))
        call_before(
            self.optimizer, "independent_gradient_partition_epilogue", partial(self._reduce_with_zeros, parameters)
        )

    def _reduce_with_zeros(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
                # The parameter may be sharded again, and torch checks its shape when a gradient is set.
                parameter.grad.data = torch.zeros(parameter.ds_shape, dtype=parameter.dtype, device=parameter.device)  # type: ignore[attr-defined]
            self.optimizer.reduce_ready_partitions_and_remove_grads(parameter)

    def gradient_shards(self) -> dict[nn.Parameter, Shard]:
        """A shard of each."""
        return {each: partitioned.shard_in(each, self._gradient(each)) for each in self.inner.trained}

    def _gradient(self, parameter: nn.Parameter) -> Tensor:
        values: Tensor = self.optimizer._get_fp32_grad_state_partition(parameter, release_swap_buffers=False)[0]
        return values

    def measure_offloaded(self) -> None:
        """Only the norms: overflow is found in the update."""
        optimizer = self.optimizer
        for parameter in self.inner.trained:
            norm = optimizer._constant_buffered_norm2(self._gradient(parameter))
            optimizer.norm_for_param_grads[optimizer.get_param_id(parameter)] = norm

    def drop_shards(self) -> None:
        """And parameters that the window has left gathered."""
        self.optimizer.zero_grad()
        self.optimizer._pre_step()
        self.reshard_all()
        self._clear()
        self.optimizer.averaged_gradients = {}
        self.optimizer.reset_cpu_buffers()

    def stale(self) -> dict[PrivateApi, Callable[[], None]]:
        """Its own buffer, and what it leaves in the master weights (_finalize_offload_gradient_accumulation)."""
        offloaded = {self.cases.stale_offloaded: self._clear_offloaded} if self.spec.offloads_optimizer else {}
        return {self.cases.stale_gradients: self._clear, **offloaded}

    def _clear(self) -> None:
        self.optimizer.grad_partitions_flat_buffer.zero_()

    def _clear_offloaded(self) -> None:
        for master in self.masters:
            if master.grad is not None:
                master.grad.zero_()

    def clipping(self) -> Clipping:
        """By DeepSpeed."""
        return EngineClipping(self)

    def stepping(self, masters: FlatMasterWeights) -> Iterable[nn.Parameter]:
        """It keeps all groups in the torch optimizer, and fills one with a part of it (_optimizer_step)."""
        return chain(*(masters.shards[master] for master in masters.stepping()))

    def gather_after(self) -> None:
        """On the stream that gathers."""
        if torch.cuda.is_available():
            partitioned.gather_after(self.optimizer)

    @property
    def masters(self) -> list[Tensor]:
        """Flat, one for each part of a group."""
        return list(self.optimizer.fp32_partitioned_groups_flat)

    def placed_masters(self) -> list[Tensor]:
        """By DeepSpeed's documented function."""
        from deepspeed.utils import safe_get_local_fp32_param

        return [torch.empty_like(safe_get_local_fp32_param(each), device="meta") for each in self.inner.trained]

    def shards_of_masters(self) -> Shards:
        """In the order of parameters."""
        shards: dict[Tensor, dict[nn.Parameter, range]] = {}
        masters = self.masters
        for parameter in self.inner.trained:
            group, start, numel = self.optimizer.grad_position[self.optimizer.get_param_id(parameter)]
            if numel:
                shards.setdefault(masters[group], {})[parameter] = range(start, start + numel)
        return shards

    def groups_of_masters(self) -> dict[Tensor, dict[str, Any]]:
        """The groups hold them only during a step."""
        groups, number = self.inner.optimizer.param_groups, self.optimizer.sub_group_to_group_id
        return {master: groups[number[index]] for index, master in enumerate(self.masters)}

    def master_shard(self, parameter: Any) -> Shard:
        """A shard of it."""
        self.cases.master_weights.require()
        if self.optimizer.get_param_id(parameter) not in self.optimizer.grad_position:
            return partitioned.own_shard(parameter)
        padded = self.optimizer._get_fp32_opt_state_partition(parameter, release_swap_buffers=False)[0]
        return partitioned.shard_in(parameter, padded)

    def weight_memory(self) -> list[Tensor]:
        """Shards, the buffers that hold those of a group, and flat master weights."""
        optimizer = self.optimizer
        buffers = [*optimizer.param_groups_fp16_flat_cpu_memory, *optimizer.fp16_partitioned_groups_flat]
        return [*buffers, *self.masters, *partitioned.shards(self.engine.module)]

    def refresh(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Only this rank's shard, if the parameter is not gathered now."""
        partitioned.write(parameter, value)
        self.gather_after()

    def copy_masters(self) -> None:
        """By DeepSpeed, one part of a group after another."""
        self.reshard_all()
        for index in range(len(self.masters)):
            self.optimizer._reassign_or_swap_out_partitioned_parameters(index)
        self.gather_after()

    def reshard_all(self) -> None:
        """By DeepSpeed."""
        self.optimizer._partition_all_parameters()


def reduce_units_by_parameter(optimizer: Any, parameters: Sequence[nn.Parameter]) -> None:
    """Reduce a leaf module's gradients one by one, as they are computed. Collective.

    DeepSpeed uses a full backward hook of the leaf module. torch fires it before the module's gradients exist if no
    positional input requires a gradient (an embedding, the first layer, inputs passed by keyword), and the hook then
    uses zeros (create_reduce_and_remove_grad_hooks). The parameters are still gathered together, which depends only on
    the module's flag.

    Args:
        optimizer: DeepSpeed's.
        parameters: All its trainable parameters.
    """
    in_leaves = [parameter for parameter in parameters if hasattr(parameter, "ds_z3_leaf_module")]
    if not in_leaves:
        return
    for hook in (*optimizer._grad_acc_hooks, *optimizer._leaf_module_hooks):
        hook.remove()
    optimizer._grad_acc_hooks.clear()
    optimizer._leaf_module_hooks.clear()
    for parameter in in_leaves:
        del parameter.ds_z3_leaf_module
    with _sharded(parameters):
        optimizer.create_reduce_and_remove_grad_hooks()


@contextmanager
def _sharded(parameters: Sequence[Any]) -> Iterator[None]:
    """A block in which DeepSpeed does not gather each of them and shard it again, as for a hook, which needs no
    values.
    """
    own = [(parameter, parameter.all_gather, parameter.partition) for parameter in parameters]
    for parameter in parameters:
        parameter.all_gather = parameter.partition = _nothing
    yield
    for parameter, all_gather, partition in own:
        parameter.all_gather, parameter.partition = all_gather, partition


def _nothing() -> None:
    pass


@contextmanager
def _buffers_by_dtype() -> Iterator[None]:
    """Hold this rank's parts of 16-bit parameters in one buffer and those of fp32 parameters in another.

    It has one buffer for all groups of the optimizer (_create_fp16_partitions_with_defragmentation). Of the groups,
    those in fp32 are the last.
    """
    from deepspeed.runtime.zero import stage3

    defragment = stage3.defragment
    stage3.defragment = lambda tensors: _Buffers(defragment, tensors)
    try:
        yield
    finally:
        stage3.defragment = defragment


class _Buffers:
    """Stands for one flat buffer, of which `_set_fp16_partitioned_groups_flat` takes the part of each group."""

    def __init__(self, defragment: Callable[[list[Tensor]], Tensor], tensors: list[Tensor]) -> None:
        dtypes = dict.fromkeys(tensor.dtype for tensor in tensors)
        self._flat = [defragment([tensor for tensor in tensors if tensor.dtype == dtype]) for dtype in dtypes]

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        """A group's part."""
        for flat in self._flat:
            if start < flat.numel():
                return flat.narrow(dim, start, length)
            start -= flat.numel()
        return self._flat[-1].narrow(dim, self._flat[-1].numel(), length)
