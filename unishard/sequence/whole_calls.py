"""Calls of a model with whole samples, by frameworks that do not know that ranks share them.

A call is split on its way in, and what it returns is whole again on its way out: each rank of a group holds the loss
and the output of the whole micro-batch, as if no ranks shared it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from unishard.data.batches import Place
from unishard.distributed.nested_tensors import replace_tensors
from unishard.errors import ContractError
from unishard.logits.deferred_logits import DeferredLogits
from unishard.sequence.forward import loss_of
from unishard.sequence.split_sequences import SplitSequences

_ITEMS = "num_items_in_batch"
_LABELS = ("labels", "shift_labels")
_OF_TOKENS = 2
"""Dimensions of a number for each token, `[batch, sequence]`, which is small."""


class WholeCalls:
    """Runs a model on whole samples."""

    def __init__(self, run: Callable[..., Any], sequences: SplitSequences, place: Place, device: torch.device) -> None:
        """Run through `run`.

        Args:
            run: The engine's forward, of a rank's part.
            sequences: What splits, and joins.
            place: Compares what ranks of a group pass, and makes parts of it.
            device: Where parts go.
        """
        self._run, self._sequences, self._place, self._device = run, sequences, place, device
        self.finish: Callable[[Mapping[str, Any], Tensor], Tensor] = _as_joined
        """What a caller gets of an output over whole sequences, given the arguments of the call by their names."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for whole samples. Collective.

        In training, where the model has computed a loss, its logits and hidden states stay in parts, which raise
        ContractError when they are used: they are what does not fit on one rank.

        Raises:
            DataError: There is no sequence, or the ranks of the group have different ones.
        """
        if self._sequences.knows((args, kwargs)):  # the script has split them itself
            return self._run(*args, **kwargs)
        call = self._sequences.forward.named(args, kwargs)
        items = call.get(_ITEMS)
        if items is not None:  # the ranks' gradients are averaged, not added up
            call = {**call, _ITEMS: items / self._sequences.group.size}
        output = self._run(**self._place(call, self._device))
        if items is not None and any(call.get(name) is not None for name in _LABELS):
            output = self._sequences.forward.averaged(output)
        split_logits = torch.is_grad_enabled() and loss_of(output) is not None
        return replace_tensors(output, lambda tensor: self._whole(tensor, call, split_logits=split_logits))

    def _whole(self, tensor: Tensor, call: Mapping[str, Any], *, split_logits: bool) -> Any:
        if isinstance(tensor, DeferredLogits):  # refuses use itself
            return tensor
        if self._sequences.is_flattened_part(tensor):
            return _Part()
        if not self._sequences.is_part_of_output(tensor):
            return tensor
        if split_logits and tensor.dim() > _OF_TOKENS:
            return _Part()
        return self.finish(call, self._sequences.whole_of_output(tensor))


def _as_joined(call: Mapping[str, Any], whole: Tensor) -> Tensor:
    return whole


class _Part:
    """In the place of logits of which a rank has a part."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise ContractError(
            "parallel.sequence: ranks of a group have parts of this output: in training of logits and hidden states of "
            "a call with labels, and always of routers' logits; call the model without labels, which returns whole "
            "logits, and compute the loss of them"
        )

    __getattr__ = __getitem__ = __len__ = __iter__ = _refuse
