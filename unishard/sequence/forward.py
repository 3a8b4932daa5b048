"""Around the forward of a model of which each call gets a part of its sequences."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unishard.config import SequenceParallel
from unishard.distributed.nested_tensors import tensors_in
from unishard.errors import ContractError
from unishard.sequence import context
from unishard.sequence.context import KeyRule, SplitBatch
from unishard.sequence.documents import Documents, documents_of
from unishard.sequence.exchange import gather_plain
from unishard.sequence.expert_balance import ExpertBalance
from unishard.sequence.group import SequenceGroup
from unishard.sequence.known_parts import KnownParts
from unishard.sequence.layout import PositionLayout
from unishard.sequence.padding import IGNORED
from unishard.sequence.replaced_attention import replaced_attention
from unishard.sequence.transformers_models import (
    counts_positions_itself,
    is_transformers,
    shifts_labels,
    use_split_attention,
)

_logger = logging.getLogger("unishard")


class SplitForward:
    """Tells attention what micro-batch runs, and makes the loss that of the whole micro-batch."""

    def __init__(
        self,
        model: nn.Module,
        group: SequenceGroup,
        layout: PositionLayout,
        section: SequenceParallel,
        parts: KnownParts,
    ) -> None:
        """Watch the forward of a model.

        Args:
            model: It calls `unishard.attention`, or is one of transformers.
            group: This rank's.
            layout: Which positions each rank has.
            section: Of the config, with `method` decided.
            parts: What was split.

        Raises:
            ModelError: It is one of transformers that computes attention by its own code, or by a function that
                transformers does not have.
        """
        self.group, self._layout, self._section = group, layout, section
        self.parts = parts
        self.last: SplitBatch | None = None
        """That of the last forward."""
        self.shifts_labels = not is_transformers(model) or shifts_labels(model)
        """Whether the model's loss is of the next token."""
        self._is_transformers = is_transformers(model)
        self._counted = False
        """Whether the loss of the running forward is to be averaged."""
        self._joined: set[KeyRule] = set()
        self.mixed_heads: set[str] = set()
        """Functions declared by heads that a proof has seen to mix them."""
        self._proving = False
        self._balance = ExpertBalance(model, group)
        self._model = model
        self._hooks: list[RemovableHandle] = []
        self._restore = _nothing
        self.loss: Tensor | None = None
        """That of the last forward, if it was made the mean over the micro-batch of the group."""
        replaced = replaced_attention(model) if self._is_transformers else []
        self.begin()
        if replaced and not dist.get_rank():
            _logger.info(
                "parallel.sequence: unishard computes the attention of %s, in place of %s (attn_implementation)",
                type(model).__name__,
                ", ".join(replaced),
            )

    def begin(self) -> None:
        """Split attention from now on.

        Raises:
            ModelError: It is one of transformers that computes attention by its own code.
        """
        self._restore = use_split_attention(self._model) if is_transformers(self._model) else _nothing
        self._hooks = [
            self._model.register_forward_pre_hook(self._before, with_kwargs=True),
            self._model.register_forward_hook(self._after, with_kwargs=True),
            self._model.register_forward_hook(self._end, with_kwargs=True, always_call=True),
        ]

    @property
    def balances_experts(self) -> bool:
        """Whether the model has a load-balancing loss."""
        return self._balance.asked

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A block in which the model is as before."""
        self.close()
        try:
            yield
        finally:
            self.begin()

    @contextmanager
    def proof(self) -> Iterator[None]:
        """A block in which attention leaves each position by itself."""
        self._proving = True
        try:
            yield
        finally:
            self._proving = False

    def close(self) -> None:
        """Leave the model as it was."""
        for hook in self._hooks:
            hook.remove()
        self._restore()

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SplitBatch:
        """Check that a call has parts of samples, with their positions. Collective in the group.

        Raises:
            ContractError: It has not.
        """
        return self._split_batch(self._given(args, kwargs), (args, kwargs))

    def enter(self) -> None:
        """From now on, parts of the last forward may run once more."""
        context.current = self.last

    def leave(self) -> None:
        """Nothing of this model runs any more."""
        context.current = None

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        arguments = self._given(args, kwargs)
        context.current = self.last = self._split_batch(arguments, (args, kwargs))
        self._counted, self.loss = False, None
        self._balance.begin()
        labels = arguments.get("shift_labels") if self.shifts_labels else None
        labels = arguments.get("labels") if labels is None else labels
        counts = self._proving or arguments.get("num_items_in_batch") is None
        if counts and isinstance(labels, Tensor) and self._is_transformers and self._takes("num_items_in_batch"):
            kwargs = {**kwargs, "num_items_in_batch": self._items(labels)}
            self._counted = True
        return args, kwargs

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by their names.

        Raises:
            TypeError: The model takes no such call.
        """
        return {**self._signature.bind_partial(*args).arguments, **kwargs}

    @property
    def _signature(self) -> inspect.Signature:
        """Of what runs as the forward: a framework may let a part of the model run in its place."""
        return inspect.signature(self._model.forward)

    def _takes(self, name: str) -> bool:
        parameters = self._signature.parameters
        return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, Any]:
        try:
            return self.named(args, kwargs) if args else kwargs
        except TypeError:  # the call itself will say it
            return kwargs

    def _split_batch(self, arguments: Mapping[str, Any], call: Any) -> SplitBatch:
        positions, mask = arguments.get("position_ids"), arguments.get("attention_mask")
        mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        if isinstance(positions, Tensor) and not self._proving:
            positions = positions if positions.dim() == 2 else positions.reshape(-1, *positions.shape[-2:])[0]
            everyones = gather_plain(positions, self.group)
            self._require_split(call, everyones)
            part, documents = positions.shape[1], self._documents(everyones, mask)
        else:
            known = (tensor for tensor in tensors_in(call) if not self.parts.is_whole(tensor))
            inputs = next(tensor for tensor in known if tensor.dim() in (2, 3))
            if not self._proving:
                self._require_split(call, gather_plain(inputs, self.group))
                self._require_positions()
            part = inputs.shape[1]
            documents = [((0, part * self.group.size),)] * len(inputs)
        return SplitBatch(
            group=self.group,
            layout=self._layout,
            method=self._section.method,
            length=part * self.group.size,
            unpadded=self.parts.length(call, part * self.group.size),
            documents=documents,
            masked=mask is not None,
            joined=self._joined,
            recurrences=self._section.recurrences,
            mixed_heads=self.mixed_heads,
            proving=self._proving,
        )

    def _require_positions(self) -> None:
        """Refuse a model that would count positions from 0 in each part."""
        if self._is_transformers and self._takes("position_ids"):
            if counts_positions_itself(self._model):
                raise ContractError(
                    f"parallel.sequence: {type(self._model).__name__} counts the positions of its tokens itself, and "
                    "would count them anew in each part; put position_ids into the batches"
                )
            raise ContractError(
                "parallel.sequence: the model was called without position_ids, and would count them anew in each part; "
                "pass all that engine.batches yields: engine(**batch), or put position_ids into the batches"
            )

    def _require_split(self, call: Any, everyones: Sequence[Tensor]) -> None:
        """Refuse a call with whole samples.

        Args:
            call: None of its tensors is a part of a batch, unless the script has made others of them.
            everyones: The positions, or the inputs, of all ranks of the group, which differ in parts of a sample.
        """
        alike = all(torch.equal(theirs, everyones[0]) for theirs in everyones)
        if (alike or not self.parts.any) and not self.parts.has(call):
            raise ContractError(
                "parallel.sequence: the model was called with samples that were not split, which it would take for "
                "parts of longer ones; read engine.batches(loader), or call engine.split_sequence(tensor)"
            )

    def _documents(self, everyones: Sequence[Tensor], mask: Tensor | None) -> list[Documents]:
        whole = self._layout.join(torch.cat([*everyones], 1), 1)
        masks = None if mask is None else self._layout.join(torch.cat(gather_plain(mask, self.group), 1), 1)
        return documents_of(whole, masks)

    def _items(self, labels: Tensor) -> Tensor:
        """What this rank divides the sum of its losses by, so that the ranks' mean is the mean of the micro-batch."""
        items = (labels != IGNORED).sum()
        dist.all_reduce(items, group=self.group.process_group)
        return items / self.group.size

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return self.averaged(output) if self._counted else output

    def averaged(self, output: Any) -> Any:
        """The output with the mean of the ranks' losses, if it has one. Collective in the group."""
        loss = loss_of(output)
        if loss is None:
            return output
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=self.group.process_group)
        shown = self.loss = loss + (mean / self.group.size - loss.detach())  # its gradient is that of this rank's part
        if isinstance(output, tuple):
            return (shown, *output[1:])
        output["loss"] = shown
        return output

    def _end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._balance.end()
        self.leave()


def loss_of(output: Any) -> Tensor | None:
    """The loss in what a model returns, where transformers' models have it; None if there is none."""
    loss = output.get("loss") if isinstance(output, Mapping) else output[0] if isinstance(output, tuple) else None
    return loss if isinstance(loss, Tensor) and not loss.dim() else None


def _nothing() -> None:
    """Of a model that calls `unishard.attention` itself."""
