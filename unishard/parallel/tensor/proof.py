"""Proves in the first forward that the ranks of a group compute one sample, and that each whole weight sees all of it.

A module with whole weights that gets another input on each rank, such as that of its heads, gives each rank a part of
the gradients. Where the plan does not say so, training would be wrong in silence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unishard.distributed.nested_tensors import tensors_in
from unishard.errors import ModelError

_MOST = 2**16
"""Elements of a tensor that are looked at."""
_WAYS = 4
"""Sums of them, each with other weights."""
_OTHER = 0.1
"""Of a norm: far above what rounding does, and far below what other values do."""


class FirstForward:
    """Watches a model until it was called once."""

    def __init__(self, model: nn.Module, modules: Mapping[str, nn.Module], peers: dist.ProcessGroup) -> None:
        """Watch.

        Args:
            model: Cut.
            modules: Those of it whose weights are whole and must see whole inputs.
            peers: Ranks that have the same samples.
        """
        self._model, self._peers = model, peers
        self._modules = {"": model, **modules}
        self._seen: dict[int, Tensor] = {}
        self._handles: list[RemovableHandle] = [
            each.register_forward_pre_hook(partial(self._look, number), with_kwargs=True)
            for number, each in enumerate(self._modules.values())
        ]
        self._handles.append(model.register_forward_hook(self._compare))

    def close(self) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _look(self, number: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and number not in self._seen:
            self._seen[number] = _sums(tensors_in((args, kwargs)))

    def _compare(self, module: nn.Module, args: object, output: object) -> None:
        if not torch.is_grad_enabled():  # nothing is trained
            self._seen.clear()
            return
        self.close()
        others, names = self._others(), [*self._modules]
        first = next((number for number in self._seen if number in others), None)
        if first == 0:
            raise ModelError(
                f"parallel.tensor: ranks of a group called {type(module).__name__} with different inputs; give "
                "neighboring ranks the same batches"
            )
        if first is not None:
            name = names[first]
            raise ModelError(
                f"parallel.tensor: {name} has whole weights, and gets another input on each rank, so each has a part "
                f"of their gradients; add {name}: replicated_with_grad_allreduce to parallel.tensor.plan"
            )

    def _others(self) -> set[int]:
        """The modules that got other inputs on other ranks, and train. Collective."""
        device = next(self._model.parameters()).device
        own = torch.full((len(self._modules), 1 + _WAYS), torch.nan, dtype=torch.float32, device=device)
        for number, sums in self._seen.items():
            own[number] = sums
        every = [torch.empty_like(own) for _ in range(dist.get_world_size(self._peers))]
        dist.all_gather(every, own, group=self._peers)
        sums = torch.stack(every)
        apart = (sums - sums[:1]).abs().amax((0, 2)) > _OTHER * sums[..., 0].amax(0)  # not where one is not finite
        trained = [
            any(weight.requires_grad for weight in each.parameters(recurse=False)) for each in self._modules.values()
        ]
        trained[0] = True
        return {number for number, other in enumerate(apart.tolist()) if other and trained[number]}


@torch.no_grad()
def _sums(tensors: Iterable[Tensor]) -> Tensor:
    """The norm of some elements, and sums of them with other weights."""
    total = torch.zeros(1 + _WAYS, dtype=torch.float64)
    for each in tensors:
        flat = each.detach().flatten()
        some = flat[:: max(1, len(flat) // _MOST)].cpu()
        some = some.abs() if some.is_complex() else some
        values = some.double() if some.is_floating_point() else some.double().mul(12.9898).sin()  # of numbers of words
        at = torch.arange(1, len(values) + 1, dtype=torch.float64)
        sums = ((values * torch.sin(at * (way + 1.7))).sum() for way in range(_WAYS))
        total += torch.stack([values.square().sum(), *sums])
    total[0].sqrt_()
    return total
