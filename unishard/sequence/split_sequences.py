"""What a run with `parallel.sequence` has: its group, and what splits batches and attends to the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from unishard.config import SequenceParallel
from unishard.data.batches import to_device
from unishard.distributed.nested_tensors import replace_tensors, tensors_in
from unishard.errors import ContractError, ModelError
from unishard.failures.endings import may_be_the_models
from unishard.sequence.batches import BatchSplitter
from unishard.sequence.exchange import gather_plain
from unishard.sequence.forward import SplitForward
from unishard.sequence.group import make_group
from unishard.sequence.kept_losses import KeptLoss
from unishard.sequence.known_parts import KnownParts
from unishard.sequence.layout import PositionLayout
from unishard.sequence.proof import prove
from unishard.sequence.transformers_models import counts_positions_itself


class SplitSequences:
    """Splits the sequences of one engine."""

    def __init__(self, model: nn.Module, section: SequenceParallel, apart: int = 1) -> None:
        """Make the groups, and let the model attend to whole sequences. Collective.

        Args:
            model: Not sharded yet.
            section: With the method that suits the model.
            apart: How far the ranks of a group are from each other.

        Raises:
            ModelError: The model computes attention by its own code.
        """
        self._model = model
        self.proved = False
        """Whether nothing but attention mixes positions."""
        self.kept_losses: tuple[KeptLoss, ...] = ()
        """Losses that modules keep, and of which parts make another one."""
        self._parts = KnownParts()
        self.group = make_group(section.size, apart)
        self._layout = PositionLayout(section.size, balanced=section.method == "allgather")
        self.forward = SplitForward(model, self.group, self._layout, section, self._parts)
        self._splitter = BatchSplitter(
            self.group,
            self._layout,
            names=None if section.keys == "auto" else section.keys,
            multiple=None if section.pad_to == "auto" else section.pad_to,
            positions=not counts_positions_itself(model),
            shifts=self.forward.shifts_labels,
            masks_padding=self.forward.balances_experts,
        )

    def place(self, batch: Any, device: torch.device) -> Any:
        """This rank's part of a batch, on its device. Collective in the group.

        Raises:
            DataError: The batch has no sequence.
        """
        split, own = self._splitter.split(batch), {id(tensor) for tensor in tensors_in(batch)}
        result = to_device(split, device)
        pairs = zip(tensors_in(split), tensors_in(result), strict=True)
        self._parts.add(result, self._splitter.length or 0, [placed for each, placed in pairs if id(each) in own])
        return result

    def prove(self, run: Callable[..., Any], args: Any, kwargs: dict[str, Any], *, again: bool = False) -> None:
        """Check, with the positions of a forward, that nothing but attention mixes positions. Collective.

        Args:
            run: The model's forward, through the engine.
            args: Of the forward.
            kwargs: Likewise.
            again: Whether it was checked before: then only whether tokens in other parts change anything.

        Raises:
            ContractError: The samples were not split.
            ModelError: On every rank: something does; names the module.
        """
        kept = prove(self._model, run, self.forward, args, kwargs, again=again)
        self.kept_losses = self.kept_losses if again else kept
        self.proved = True

    def refuse_failure(self, error: Exception) -> None:
        """Raise ModelError in place of an error of the first forward, in which the model gets parts of its samples."""
        if self.proved or not may_be_the_models(error):
            return
        text = f"{type(error).__name__}: {error}".rstrip(".")
        raise ModelError(
            f"the model fails where each rank has a part of its sequences: {text}; if it runs without "
            "parallel.sequence, name what is to be split in parallel.sequence.keys, or leave the section out"
        ) from error

    @contextmanager
    def whole_samples(self, call: Any) -> Iterator[None]:
        """A block in which the model attends as without a group, to generate.

        Raises:
            ContractError: `call` has parts of samples.
        """
        if self._parts.has(call):
            raise ContractError(
                "generate needs whole prompts, but got a part of a batch of engine.batches; read the loader itself: "
                "for batch in loader"
            )
        with self.forward.paused():
            yield

    def part(self, tensor: Tensor, fill: float | None = None) -> Tensor:
        """This rank's part of a whole tensor, `[batch, sequence, ...]`.

        Raises:
            DataError: It must be padded, and nobody says with what.
        """
        part = self._splitter.part(tensor, fill=fill)
        self._parts.add(part, tensor.shape[1])
        return part

    def whole(self, part: Tensor) -> Tensor:
        """The whole tensor, of the parts of all ranks of the group, `[batch, part, ...]`. Collective in the group."""
        return self._layout.join(torch.cat(gather_plain(part, self.group), 1), 1)

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor with its padding."""
        return self._layout.take(whole, self.group.rank, 1)

    def joined(self, data: Any) -> Any:
        """Data with whole sequences in the place of parts of the last forward's length. Collective in the group."""
        split = self.forward.last
        if split is None:
            return data

        def whole(tensor: Tensor) -> Tensor:
            if tensor.dim() < 2 or tensor.shape[1] != split.part:
                return tensor
            return self.whole(tensor)[:, : self._splitter.length]

        return replace_tensors(data, whole)

    def knows(self, call: Any) -> bool:
        """Whether an argument of a call is a part that was split here."""
        return self._parts.has(call)

    def is_part_of_output(self, tensor: Tensor) -> bool:
        """Whether a tensor is `[batch, part, ...]` of the last forward."""
        split = self.forward.last
        return split is not None and tensor.shape[:2] == (len(split.documents), split.part)

    def is_flattened_part(self, tensor: Tensor) -> bool:
        """Whether a tensor is `[batch x part, ...]` of the last forward, such as the logits of routers."""
        split = self.forward.last
        return split is not None and split.part > 1 and tensor.shape[:1] == (len(split.documents) * split.part,)

    def whole_of_output(self, tensor: Tensor) -> Tensor:
        """A whole tensor of one that `is_part_of_output`, with its graph. Collective in the group.

        Every rank of the group must compute the same of it: the gradient of this rank's part is its own.
        """
        whole: Tensor = _Whole.apply(tensor, self)  # type: ignore[no-untyped-call]
        return whole[:, : self._splitter.length]

    def close(self) -> None:
        """Leave the model as it was."""
        self.forward.close()


class _Whole(torch.autograd.Function):
    """The parts of all ranks, of which each rank computes the same loss."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, sequences: SplitSequences) -> Tensor:
        ctx.sequences = sequences
        return sequences.whole(part)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # The engine averages over the ranks, each of which has the whole loss.
        return ctx.sequences.own(gradient) * ctx.sequences.group.size, None
