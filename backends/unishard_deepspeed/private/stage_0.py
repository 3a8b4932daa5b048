"""DeepSpeed's optimizers without shards."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unishard.distributed.shards import Shard
from unishard.distributed.slices import of_full, slice_of
from unishard_deepspeed.masters.flat_master_weights import FlatMasterWeights, Shards
from unishard_deepspeed.masters.inner_optimizer import InnerOptimizer
from unishard_deepspeed.private.clipping import TorchClipping
from unishard_deepspeed.private.slices import named_as_moe
from unishard_deepspeed.private.table import OF_STAGE_0
from unishard_deepspeed.private.zero_optimizer import Clipping, ZeroOptimizer
from unishard_deepspeed.spec import ZeroSpec


@final
class Stage0(ZeroOptimizer):
    """The torch optimizer on the parameters, or `FP16_UnfusedOptimizer` on fp32 copies of them."""

    cases = OF_STAGE_0
    fills_gradients = True  # DeepSpeed 0.19.8, runtime/engine.py, _get_gradients_for_reduction

    def __init__(self, spec: ZeroSpec, engine: Any, inner: InnerOptimizer) -> None:
        super().__init__(spec, engine, inner)
        checker = getattr(self.optimizer, "overflow_checker", None)
        if checker is not None and any(map(slice_of, inner.trained)):
            # Over all ranks, not over peers, which it looks for by a size in names (runtime/utils.py, has_overflow).
            checker.has_moe_params, checker.zero_reduce_scatter = False, True

    @classmethod
    def building(cls, model: nn.Module, inner: InnerOptimizer) -> AbstractContextManager[None]:
        """With the groups of slices."""
        return named_as_moe(model, inner.optimizer, cls.cases.slices)

    def restore_fp32_weights(self, originals: Iterable[tuple[nn.Parameter, Tensor]]) -> list[RemovableHandle]:
        """Undo as well what the wrapper has done to the torch optimizer, and accumulate in fp32 if asked to.

        It steps once when it is built (DeepSpeed 0.19.8, runtime/fp16/unfused_optimizer.py,
        initialize_optimizer_states): clearing the state undoes Adam's step count and moments, copying the weights
        undoes weight decay. It accumulates, reduces and takes the norm of `parameter.grad`, for which DeepSpeed has no
        setting but the parameter's dtype (runtime/engine.py, _do_optimizer_sanity_check); torch allows an fp32 gradient
        of a bf16 or fp16 parameter (`grad_dtype`), and DeepSpeed's optimizer uses it.
        """
        if self.spec.precision.compute == self.spec.precision.master:
            return []
        self.inner.optimizer.state.clear()
        for parameter, value in originals:
            if parameter in self.inner.full_masters:
                self.inner.full_masters[parameter].copy_(value)
        if self.spec.precision.accumulate != "fp32":
            return []
        return [_accumulate_in_fp32(parameter) for parameter in self.inner.trained]

    def fill_gradients(self) -> None:
        """Create zero gradients in fp32 for parameters without one that accumulate in fp32.

        DeepSpeed would create them in the parameter's dtype, and reduce them apart from those of ranks that used the
        parameter (DeepSpeed 0.19.8, runtime/engine.py, _get_gradients_for_reduction).
        """
        for parameter in self.inner.trained:
            if parameter.grad is None and parameter.grad_dtype is None:
                parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)

    def gradient_shards(self) -> dict[nn.Parameter, Shard]:
        """Whole gradients."""
        parts = {}
        for parameter in self.engine.module.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)  # frozen in `prepare`; the others have one
                parts[parameter] = of_full(parameter, Shard(parameter.shape, parameter.grad))
        return parts

    def clipping(self) -> Clipping:
        """By torch, in a hook of its optimizer."""
        return TorchClipping(self)

    def calls_in_update(self) -> int:
        """All groups at once."""
        return 1

    def stepping(self, masters: FlatMasterWeights) -> Iterable[nn.Parameter]:
        """Without those of a skipped update, whose gradients are taken away."""
        return (each for each in self.inner.stepping() if self.inner.full_masters[each].grad is not None)

    def shards_of_masters(self) -> Shards:
        """A whole parameter each."""
        return {master: {parameter: range(parameter.numel())} for parameter, master in self.inner.full_masters.items()}

    def master_shard(self, parameter: nn.Parameter) -> Shard:
        """All of it."""
        return of_full(parameter, Shard(parameter.shape, self.inner.full_masters.get(parameter, parameter.detach())))

    def copy_masters(self) -> None:
        """Where there are copies."""
        for parameter, master in self.inner.full_masters.items():
            if parameter is not master:
                parameter.data.copy_(master)


def _accumulate_in_fp32(parameter: nn.Parameter) -> RemovableHandle:
    """Cast a window's first gradient, to which later ones are added in place.

    `grad_dtype = fp32` would also cast the gradient of each use of a weight before autograd adds them; plain torch and
    the other stages add them in the compute dtype.
    """
    parameter.grad_dtype = None  # any

    def cast(parameter: Tensor) -> None:
        if parameter.grad is not None and parameter.grad.dtype != torch.float32:
            parameter.grad = parameter.grad.float()

    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(cast)  # type: ignore[no-untyped-call]
    return handle
