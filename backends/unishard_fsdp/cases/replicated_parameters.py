"""Parameters that every rank holds whole (`sharding.replicate`), which `fully_shard` ignores: their master weights, and
the mean of their gradients over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unishard.config import Precision
from unishard.contract.kit.kept_fp32 import is_kept
from unishard.contract.kit.replicated import is_replicated
from unishard.distributed.dtypes import DTYPES
from unishard_fsdp.cases.case import FSDPCase


@final
class ReplicatedParameters(FSDPCase):
    """The replicated parameters of a model that trains.

    In a 16-bit run a parameter is in the compute dtype, as FSDP2 gathers the others, and its master weight beside it.
    Gradients add up on each rank over a window, and are averaged in one all-reduce when its last backward ends, after
    which `parameter.grad` is the mean, as it is of a sharded parameter.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, precision: Precision) -> None:
        """Cast the parameters in place.

        Args:
            model: Sharded already, and the optimizer built.
            precision: The section.
        """
        replicated = [parameter for parameter in model.parameters() if is_replicated(parameter)]
        self.trained = [parameter for parameter in replicated if parameter.requires_grad]
        """Those that train, in model order."""
        self.masters: Mapping[nn.Parameter, Tensor] = {}
        """The weights before the cast, frozen ones too, of the parameters that compute in another dtype."""
        self._reduce, accumulate = DTYPES[precision.reduce], DTYPES[precision.accumulate]
        self._averaged = False
        self._hooks: list[RemovableHandle] = []
        if precision.compute != "fp32":
            self.masters = dict(_cast(replicated, DTYPES[precision.compute]))
        for parameter in self.masters.keys() & set(self.trained):
            parameter.grad_dtype = None  # any: the mean has the dtype of the master weight
            if parameter.dtype != accumulate:
                hook = parameter.register_post_accumulate_grad_hook(_add_up_in(accumulate))  # type: ignore[no-untyped-call]
                self._hooks.append(hook)

    @contextmanager
    def backward(self, *, last: bool) -> Iterator[None]:
        """A block with a backward. Collective if its micro-batch is the last of a window.

        Such a micro-batch may have several backwards: what the earlier ones left is averaged already.
        """
        before = self._take_averaged()
        yield
        if last:
            self.finish()
            for parameter, gradient in before.items():
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def _take_averaged(self) -> dict[nn.Parameter, Tensor]:
        if not self._averaged:
            return {}
        taken = {parameter: parameter.grad for parameter in self.trained if parameter.grad is not None}
        self.forget()
        for parameter in taken:
            parameter.grad = None
        return taken

    @torch.no_grad()
    def finish(self) -> None:
        """Replace the gradients of this window by their means over the ranks, once. Collective.

        A rank without one adds zeros; where no rank has one, there is none, as in plain torch.
        """
        if self._averaged or not self.trained:
            return
        self._averaged = True
        gradients = [parameter.grad for parameter in self.trained]
        world, device = dist.get_world_size(), self.trained[0].device
        used = torch.tensor([gradient is not None for gradient in gradients], dtype=self._reduce).to(device)
        rows = [
            torch.zeros(parameter.numel(), dtype=self._reduce, device=device)
            if gradient is None
            else gradient.reshape(-1).to(self._reduce)
            for parameter, gradient in zip(self.trained, gradients, strict=True)
        ]
        sums = torch.cat([*rows, used])
        del rows
        if world > 1:
            sums.div_(world)  # first: a sum in fp16 may overflow
            dist.all_reduce(sums)
        *means, used = torch.split(sums, [*(parameter.numel() for parameter in self.trained), len(self.trained)])
        complete = all(gradient is not None for gradient in gradients)
        flags = [True] * len(gradients) if complete else used.gt(0).tolist()  # only a rank that lacks one waits for it
        for parameter, mean, is_used in zip(self.trained, means, flags, strict=True):
            dtype = self.masters.get(parameter, parameter).dtype
            parameter.grad = mean.view(parameter.shape).to(dtype) if is_used else None

    @torch.no_grad()
    def written(self) -> None:
        """Update the parameters from their master weights."""
        for parameter, master in self.masters.items():
            parameter.data.copy_(master)

    def forget(self) -> None:
        """Reset at the end of a window."""
        self._averaged = False

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


def _cast(parameters: list[nn.Parameter], dtype: torch.dtype) -> Iterator[tuple[nn.Parameter, Tensor]]:
    for parameter in parameters:
        if parameter.is_floating_point() and parameter.dtype != dtype and not is_kept(parameter):
            master = parameter.data
            parameter.data = master.to(dtype)
            yield parameter, master


def _add_up_in(dtype: torch.dtype) -> Callable[[Tensor], None]:
    """A hook that casts the first gradient of a window, to which later ones are added in place.

    `grad_dtype` would also cast the gradient of each use of a weight before autograd adds them; of a sharded parameter
    they are added in the compute dtype.
    """

    def cast(parameter: Tensor) -> None:
        if parameter.grad is not None and parameter.grad.dtype != dtype:
            parameter.grad = parameter.grad.to(dtype)

    return cast
