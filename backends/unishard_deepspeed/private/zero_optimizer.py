"""What the rest of the backend asks of DeepSpeed's optimizer; the files beside this one have a class for each."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.hooks import RemovableHandle

from unishard.contract.private_api import PrivateApi
from unishard.distributed.host_read import HostRead
from unishard.distributed.shards import Shard
from unishard_deepspeed.masters.flat_master_weights import FlatMasterWeights, Shards
from unishard_deepspeed.masters.inner_optimizer import InnerOptimizer
from unishard_deepspeed.private.building import keep_adagrad
from unishard_deepspeed.private.zero_parameters import ZeroParameters
from unishard_deepspeed.spec import ZeroSpec


class Clipping(Protocol):
    """Divides and clips the gradients of an update, and reports its outcome."""

    def prepare(self, max_norm: float | None, divisor: float) -> None:
        """Set the divisor and the maximum norm before `engine.step()`; None for no clipping."""

    def step(self) -> tuple[float | HostRead, bool | None]:
        """Call `engine.step()`; return the norm before clipping, and whether the update was made; None: if the norm is
        finite.
        """
        ...


class ZeroOptimizer(ZeroParameters):
    """DeepSpeed's optimizer in one engine, and the torch optimizer inside it.

    A method with a default does what is right where every rank holds whole parameters.

    | class | reduced gradients | master weights |
    |---------------------------------|-------------------------------------------------|------------------------------------|
    | `Stage0`, torch's optimizer | full, `.grad` | the parameters |
    | `Stage0`, FP16_UnfusedOptimizer | full, `.grad`, by default in fp32 | full, `fp32_groups` |
    | `Stages12` | flat partitions, `averaged_gradients` | flat partitions |
    | the same, offloaded | flat partitions, `.grad` of the master weights | flat partitions, in host memory |
    | `Stage3` | a shard of each parameter, padded at the end | a shard of each parameter, padded |
    """

    fills_gradients: ClassVar[bool] = False
    """Whether DeepSpeed reduces zeros for parameters that a rank has not used."""

    def __init__(self, spec: ZeroSpec, engine: Any, inner: InnerOptimizer) -> None:
        """Take what `deepspeed.initialize` has made.

        Args:
            spec: What was built.
            engine: The `DeepSpeedEngine`.
            inner: The torch optimizer.
        """
        super().__init__(spec, engine)
        self.inner, self.trained = inner, inner.trained

    @classmethod
    def building(cls, model: nn.Module, inner: InnerOptimizer) -> AbstractContextManager[None]:
        """A block in which `deepspeed.initialize` makes it."""
        return keep_adagrad(inner.optimizer)

    def restore_fp32_weights(self, originals: Iterable[tuple[nn.Parameter, Tensor]]) -> list[RemovableHandle]:
        """Set the master weights from the fp32 model: DeepSpeed has made them from parameters already rounded.

        Args:
            originals: The fp32 weights of each parameter: its full tensor, or this rank's shard.

        Returns:
            Hooks to remove with the engine.
        """
        for parameter, value in originals:
            _set_master(parameter, value)
        return []

    def average_between(self, group: Any) -> None:
        """Average the gradients of a window over a process group before they are clipped and applied.

        Collective, in each window.

        Args:
            group: The ranks that hold the same shard of different copies.
        """

    def reduce_last(self, parameters: Sequence[nn.Parameter]) -> None:
        """Reduce the gradients of some parameters after backward, in this order, with zeros for missing ones.
        Collective.

        DeepSpeed reduces gradients in the order in which they are computed, so ranks that use different parameters
        would reduce different ones together.
        """

    def fill_gradients(self) -> None:
        """Give parameters a gradient that DeepSpeed would give another one."""

    def reduce_gradients(self) -> None:
        """Do the first part of `engine.step()` (runtime/engine.py): reduce at stages 0 and 1, finish the window at 2
        and 3. Collective.
        """
        self.fill_gradients()
        self.engine._running_engine_step = True  # is_gradient_accumulation_boundary() answers with it
        try:
            if self.engine.zero_optimization_partition_gradients():
                self.optimizer.finalize_gradient_accumulation_boundary()
            else:
                self.engine.allreduce_gradients()
        finally:
            self.engine._running_engine_step = False

    @abstractmethod
    def gradient_shards(self) -> dict[nn.Parameter, Shard]:
        """This rank's shard of each reduced gradient. An unused trainable parameter has zeros."""

    def measure_offloaded(self) -> None:
        """Recompute norms and overflow of offloaded gradients, which DeepSpeed computes before the user can edit
        them.
        """

    def drop_shards(self) -> None:
        """Drop the gradients of a window from DeepSpeed's buffers, as `optimizer.step()` does after an overflow."""

    def stale(self) -> dict[PrivateApi, Callable[[], None]]:
        """What zeroes gradients that would be applied again if later updates do not use their parameter, by its case.

        DeepSpeed overwrites only those of used parameters; offloaded ones of others are not in the norm.
        """
        return {}

    @abstractmethod
    def clipping(self) -> Clipping:
        """What divides and clips gradients in its updates."""

    def without_overflow_check(self) -> AbstractContextManager[list[bool]]:
        """Make updates with non-finite gradients, as plain torch does, instead of skipping them.

        Yields:
            The results that the check would have returned; some stages replace a non-finite norm by 1 or -1.
        """
        return never_invalid(self.optimizer)

    def stepping(self, masters: FlatMasterWeights) -> Iterable[nn.Parameter]:
        """Inside a step of the torch optimizer: whose master weights it steps, all or in part."""
        return self.inner.stepping()

    def calls_in_update(self) -> int:
        """How often the torch optimizer steps in an update: ZeRO steps one group after another, or parts of groups."""
        return len(self.groups_of_masters())

    @property
    def masters(self) -> list[Tensor]:
        """The live master weights on this rank, full or flat."""
        return self.inner.masters

    def placed_masters(self) -> list[Tensor]:
        """Tensors of their dtypes and sizes."""
        return self.inner.masters

    @abstractmethod
    def shards_of_masters(self) -> Shards:
        """The shards of parameters in each master weight on this rank."""

    def groups_of_masters(self) -> dict[Tensor, dict[str, Any]]:
        """The torch optimizer's group of each master weight."""
        return {master: group for group in self.inner.optimizer.param_groups for master in group["params"]}

    def unlink_states(self) -> None:
        """Remove DeepSpeed's views of the optimizer state, so that its memory is freed."""

    def link_states(self, *, now: bool) -> None:
        """Let DeepSpeed link the optimizer state again after the next update, which may create more, and at once."""


@contextmanager
def never_invalid(optimizer: Any) -> Iterator[list[bool]]:
    """A block in which an optimizer takes no norm for invalid; yields what it would have taken each for.

    All call `is_invalid_grad_norm` of their module (runtime/utils.py).
    """
    answers: list[bool] = []

    def answer(norm: Any) -> bool:
        answers.append(is_invalid(norm))
        return False

    module = sys.modules[type(optimizer).__module__]
    is_invalid = module.is_invalid_grad_norm
    module.is_invalid_grad_norm = answer  # type: ignore[attr-defined]
    try:
        yield answers
    finally:
        module.is_invalid_grad_norm = is_invalid  # type: ignore[attr-defined]


def _set_master(parameter: Any, value: Tensor) -> None:
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

    if not hasattr(parameter, "ds_tensor"):
        safe_set_full_fp32_param(parameter, value)
    elif (
        parameter.ds_tensor.numel()
    ):  # `safe_set_full_fp32_param` fails if a parameter's size is not divisible by the ranks
        safe_set_local_fp32_param(parameter, pad(value, (0, parameter.ds_tensor.numel() - value.numel())))
