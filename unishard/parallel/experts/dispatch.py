"""The forward of experts of which each rank has some: tokens go to the ranks that have their experts, and come back.

The experts of a rank thereby see the tokens of the whole group, each of whose losses is a mean over one rank's tokens.
Ranks that have layers together have the same tokens: each sends a part of them, and gets the results of all.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from unishard.errors import ModelError
from unishard.parallel.collectives import all_to_all, copied, reach, scale_gradient, seen_as, summed
from unishard.parallel.experts.finding import ExpertLayer
from unishard.parallel.groups import Groups

_FEW = 4
"""Tokens that show what the forward of a module of experts does."""
_RELATIVE = 1e-2
"""Above what rounding makes of results in 16 bits."""


class Dispatch:
    """Stands for the forward of a module of experts."""

    def __init__(self, experts: ExpertLayer, groups: Groups, same: Groups | None) -> None:
        """Around the module, which has this rank's experts only.

        Args:
            experts: The module, before it is cut.
            groups: Of this rank: the ranks that have the experts together.
            same: Those that have the same tokens, if there are any.
        """
        self.experts, self.groups, self._same = experts, groups, same
        self._own: Callable[..., Tensor] = experts.module.forward
        self.local = experts.number // groups.size
        """How many of them this rank has."""
        self._signature = inspect.signature(self._own)
        self.factor = 1.0
        """What the gradients of the weights are multiplied by."""
        self._proved = False

    def count_gradients(self, *, over_holders: bool) -> None:
        """As in `SlicedModel`: a token counts once, whichever of the ranks with it has sent it."""
        self.factor = (1 if self._same is None else self._same.size) / (self.groups.size if over_holders else 1)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """As the module's own forward. Collective in the group."""
        tokens, chosen, weights = self._signature.bind(*args, **kwargs).args
        width, each = tokens.shape[-1], chosen.shape[-1]
        output = _dispatched(self, tokens.reshape(-1, width), chosen.reshape(-1, each), weights.reshape(-1, each))
        return output.view(tokens.shape).to(tokens.dtype)

    def run(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The sum over the experts of each token, `[tokens, width]`, in the order of the tokens.

        Args:
            tokens: `[tokens, width]`.
            chosen: The numbers of their experts, `[tokens, each]`; others than those of the experts stand for none.
            weights: Of these, `[tokens, each]`.
        """
        if (same := self._same) is None:
            return self._weighed(tokens, chosen, weights)
        first, last = (len(tokens) * (same.number + turn) // same.size for turn in range(2))
        part, shares = (copied(each, same)[first:last] for each in (tokens, weights))
        results = self._weighed(part, chosen[first:last], shares)
        return summed(functional.pad(results, (0, 0, first, len(tokens) - last)), same)

    def _weighed(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        results = self._exchanged(tokens, chosen)
        return (results.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1)

    def _exchanged(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        """What its experts make of each token, `[tokens x each, width]`."""
        groups, flat = self.groups, chosen.reshape(-1)
        size = groups.size
        if groups.peers is not None and not self._proved and len(tokens):
            self._prove(tokens[:_FEW].detach())
        total = size * self.local
        known = torch.where((flat >= 0) & (flat < total), flat, total)
        order = torch.argsort(known, stable=True)
        counts = known.new_zeros(total + 1).scatter_add_(0, known, torch.ones_like(known))  # `bincount` waits on CUDA
        send = counts[:total].view(size, self.local)
        receive = torch.empty_like(send)
        groups.all_to_all(receive, send)
        if groups.peers is None:  # in a plan, all get as many
            sent = received = [len(each) for each in flat.tensor_split(size)]
        else:
            sent, received = torch.stack([send.sum(1), receive.sum(1)]).tolist()  # the only wait
        order = order[: sum(sent)]
        inputs = all_to_all(tokens[order // chosen.shape[-1]], received, sent, groups)
        numbers = torch.arange(self.local, device=tokens.device).repeat(size)
        numbers = numbers.repeat_interleave(receive.reshape(-1), output_size=sum(received))
        outputs = all_to_all(self._computed(inputs, numbers[:, None]), sent, received, groups)
        return outputs.new_zeros((len(flat), outputs.shape[-1])).index_copy(0, order, outputs)

    def _computed(self, inputs: Tensor, numbers: Tensor) -> Tensor:
        """What this rank's experts make of tokens."""
        module, names = self.experts.module, self.experts.parameters
        inputs = reach(inputs, [getattr(module, name) for name in names])  # also without tokens
        if not len(inputs):
            return inputs
        with seen_as(module, dict.fromkeys(names, partial(scale_gradient, factor=self.factor))):
            return self._own(inputs, numbers, torch.ones_like(numbers, dtype=inputs.dtype))

    @torch.inference_mode()  # what is computed here is no part of a forward that is recomputed
    def _prove(self, inputs: Tensor) -> None:
        """Check that the weights of experts multiply their results, and nothing before, and that tokens are apart:
        every rank by its own tokens.

        Raises:
            ModelError: They do more, or tokens are not.
        """
        made, half, first = self._tried(inputs, 1.0), self._tried(inputs, 0.5), self._tried(inputs[:1], 1.0)
        largest = float(made.abs().max())
        if not math.isfinite(largest):
            return  # proves nothing
        equal = partial(torch.allclose, rtol=_RELATIVE, atol=_RELATIVE * largest)
        if not equal(made * 0.5, half) or not equal(made[:1], first):
            raise ModelError(
                f"parallel.expert cannot divide {self.experts.name} ({type(self.experts.module).__name__}): its "
                "forward must multiply what an expert makes of each token by the weight of the expert, and do no more"
            )
        self._proved = True

    def _tried(self, inputs: Tensor, weight: float) -> Tensor:
        """What the module makes of tokens without dropout, and without a random number that is missed later."""
        numbers = torch.arange(len(inputs), device=inputs.device)[:, None] % self.local
        training = [each for each in self.experts.module.modules() if each.training]
        try:
            for each in training:
                each.training = False
            with torch.random.fork_rng([inputs.device] if inputs.device.type == "cuda" else []):
                return self._own(inputs, numbers, torch.full_like(numbers, weight, dtype=inputs.dtype))
        finally:
            for each in training:
                each.training = True


def _run(dispatch: Dispatch, *tensors: Tensor) -> Tensor:
    return dispatch.run(*tensors)


# Not compiled: how many tokens go where is known only when they do.
_dispatched: Callable[..., Tensor] = torch.compiler.disable(_run)  # type: ignore[no-untyped-call]
