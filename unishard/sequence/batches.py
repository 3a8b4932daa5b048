"""Splits a batch along its sequence: each rank of a group gets the positions that are its own."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from unishard.distributed.nested_tensors import replace_tensors, tensors_in
from unishard.errors import DataError
from unishard.sequence.group import SequenceGroup
from unishard.sequence.layout import PositionLayout

_IGNORED = -100
"""The label that the losses of transformers and torch leave out."""
_INPUTS = ("input_ids", "inputs_embeds")
_OF_OTHER_TOWERS = ("pixel_values", "pixel_values_videos", "input_features", "input_values")
"""Inputs that transformers' models put into the sequence at the places of some tokens."""


class BatchSplitter:
    """Gives this rank its part of each batch. Not collective: every rank of a group has read the whole batch."""

    def __init__(
        self,
        group: SequenceGroup,
        layout: PositionLayout,
        *,
        names: Sequence[str] | None = None,
        multiple: int | None = None,
        positions: bool = True,
        shifts: bool = True,
        masks_padding: bool = False,
    ) -> None:
        """Split batches.

        Args:
            group: This rank's.
            layout: Which positions it has.
            names: Keys of the tensors to split; None for each that is as long as the sequence.
            multiple: Sequences are padded at their end to a multiple of it; None for the least that can be split.
            positions: Whether the model counts positions from 0 where a batch has no `position_ids`.
            shifts: Whether labels are those of the next token, where a batch has no `shift_labels`.
            masks_padding: Whether the model must know what is padding, because its loss counts every token.
        """
        self._group, self._layout, self._names = group, layout, names
        self._multiple = layout.multiple if multiple is None else multiple
        self._positions, self._shifts, self._masks_padding = positions, shifts, masks_padding
        self.length: int | None = None
        """Of the sequences of the last batch, before padding."""

    def split(self, batch: Any) -> Any:
        """This rank's part of a batch, with `position_ids`, and with `shift_labels` where there are `labels`.

        Raises:
            DataError: The batch has no sequence.
        """
        length = length_of(batch)
        if length is None:
            raise DataError(
                "parallel.sequence found no sequence in a batch: no tensor has a second dimension; name the keys in "
                "parallel.sequence.keys"
            )
        self.length = length
        self._require_text(batch)
        self._require_fitting_mask(batch, length)
        if not isinstance(batch, Mapping):
            return replace_tensors(batch, partial(self._split, "", length))
        batch = self._completed(batch)
        new = copy.copy(batch) if hasattr(batch, "update") else dict(batch)
        new.update({key: replace_tensors(value, partial(self._split, key, length)) for key, value in batch.items()})
        return new

    def _require_text(self, batch: Any) -> None:
        key = next((name for name in _OF_OTHER_TOWERS if isinstance(batch, Mapping) and name in batch), None)
        if key is not None and batch.get(key) is not None:
            raise DataError(
                f"{key}: parallel.sequence splits sequences of tokens, and a rank cannot tell which images or sounds "
                "are in its part; remove parallel.sequence for batches that have some"
            )

    def _require_fitting_mask(self, batch: Any, length: int) -> None:
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        if isinstance(mask, Tensor) and mask.dim() == 4 and length % self._multiple:
            raise DataError(
                f"an attention_mask of four dimensions has {length} positions, no multiple of {self._multiple}, which "
                "parallel.sequence needs; pad the batch and its mask"
            )

    def part(self, tensor: Tensor, *, fill: float = 0, dim: int = 1) -> Tensor:
        """This rank's part of a whole tensor, which is filled up at its end to the multiple."""
        missing = -tensor.shape[dim] % self._multiple
        if missing:
            tensor = functional.pad(tensor, [0, 0] * (tensor.dim() - 1 - dim) + [0, missing], value=fill)
        return self._layout.take(tensor, self._group.rank, dim)

    def _split(self, name: str, length: int, tensor: Tensor) -> Tensor:
        if not self._has_sequence(name, length, tensor):
            return tensor
        if name == "position_ids":  # padding is a document of its own
            padding = torch.arange(-length % self._multiple, device=tensor.device, dtype=tensor.dtype)
            return self.part(torch.cat([tensor, padding.expand(*tensor.shape[:-1], -1)], -1), dim=tensor.dim() - 1)
        return self.part(tensor, fill=_IGNORED if name in ("labels", "shift_labels") else 0)

    def _has_sequence(self, name: str, length: int, tensor: Tensor) -> bool:
        if self._names is not None:
            return name in (*self._names, "position_ids", "shift_labels")
        if name == "position_ids":
            return tensor.shape[-1] == length
        return tensor.dim() >= 2 and tensor.shape[1] == length and not (tensor.dim() == 4 and "mask" in name)

    def _completed(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """The batch with what must be known of the whole sequence."""
        added: dict[str, Tensor] = {}
        whole = next((batch[name] for name in _INPUTS if isinstance(batch.get(name), Tensor)), None)
        if self._positions and whole is not None and batch.get("position_ids") is None:
            lengths = batch.get("seq_lens")
            added["position_ids"] = _positions(whole, lengths if isinstance(lengths, Tensor) else None)
        if whole is not None and self._masks_padding and whole.shape[1] % self._multiple:
            added |= self._mask(batch, whole)
        labels = batch.get("labels")
        if self._shifts and isinstance(labels, Tensor) and labels.dim() == 2 and batch.get("shift_labels") is None:
            added["shift_labels"] = functional.pad(labels[:, 1:], (0, 1), value=_IGNORED)
        return {**batch, **added} if added else batch

    def _mask(self, batch: Mapping[str, Any], whole: Tensor) -> dict[str, Tensor]:
        positions = batch.get("position_ids")
        if batch.get("attention_mask") is not None:
            return {}
        if isinstance(positions, Tensor) and bool((positions.diff(dim=-1) != 1).any()):
            raise DataError(
                f"samples of packed documents have {whole.shape[1]} positions, no multiple of {self._multiple}, and "
                "padding would count in the load-balancing loss of the experts; pack them to such a length"
            )
        return {"attention_mask": torch.ones(whole.shape[:2], dtype=torch.long, device=whole.device)}


def _positions(whole: Tensor, lengths: Tensor | None) -> Tensor:
    """The position of each token in its document, of documents of these lengths."""
    rows, length = whole.shape[:2]
    if lengths is None:
        return torch.arange(length, device=whole.device).expand(rows, length)
    documents = [[*of_row, length - sum(of_row)] for of_row in lengths.reshape(rows, -1).tolist()]
    return torch.stack([torch.cat([torch.arange(each) for each in of_row]) for of_row in documents]).to(whole.device)


def length_of(batch: Any) -> int | None:
    """The length of the sequences: that of the inputs, else of the first tensor with two dimensions, but for a mask of
    four.
    """
    if isinstance(batch, Mapping):
        inputs = next((batch[name] for name in _INPUTS if isinstance(batch.get(name), Tensor)), None)
        if inputs is not None:
            return int(inputs.shape[1])
    return next((int(tensor.shape[1]) for tensor in tensors_in(batch) if tensor.dim() in (2, 3)), None)
