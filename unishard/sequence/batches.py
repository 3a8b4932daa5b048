"""Splits a batch along its sequence: each rank of a group gets the positions that are its own."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from unishard.distributed.nested_tensors import replace_tensors, tensors_in
from unishard.errors import DataError
from unishard.sequence.group import SequenceGroup
from unishard.sequence.layout import PositionLayout
from unishard.sequence.padding import IGNORED, Path, fills_of, ignored_label, title_of

_POSITIONS = ("position_ids", 0)
_BORDERS = ("cu_seq_lens_q", "seq_idx")
"""How a batch says where documents begin, in words that kernels take."""
_OF_ROWS = 2
"""Dimensions of `[batch, sequence]`."""
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
            names: Keys of the tensors to split; None for each that is as long as the sequence in the first batch that
                has it.
            multiple: Sequences are padded at their end to a multiple of it; None for the least that can be split.
            positions: Whether the model counts positions from 0 where a batch has no `position_ids`.
            shifts: Whether labels are those of the next token, where a batch has no `shift_labels`.
            masks_padding: Whether the model must know what is padding, because its loss counts every token.
        """
        self._group, self._layout, self._names = group, layout, names
        self._multiple = layout.multiple if multiple is None else multiple
        self._positions, self._shifts, self._masks_padding = positions, shifts, masks_padding
        self._decided: dict[tuple[str, int, int], bool] = {}
        """Whether a tensor is split, by its place in a batch and its dimensions."""
        self.length: int | None = None
        """Of the sequences of the last batch, before padding."""

    def split(self, batch: Any) -> Any:
        """This rank's part of a batch, with `position_ids`, and with `shift_labels` where there are `labels`.

        Raises:
            DataError: The batch has no sequence, or what it is padded with would train.
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
        if isinstance(batch, Mapping):
            batch = self._completed(batch)
        chosen = {path: tensor for path, tensor in _by_path(batch).items() if self._is_split(path, length, tensor)}
        parts = self._parts_of(chosen, length)
        if not isinstance(batch, Mapping):
            return _replaced("", batch, parts)
        new = copy.copy(batch) if hasattr(batch, "update") else dict(batch)
        new.update({key: _replaced(key, value, parts) for key, value in batch.items()})
        return new

    def _parts_of(self, chosen: Mapping[Path, Tensor], length: int) -> dict[Path, Tensor]:
        positions, parts = chosen.get(_POSITIONS), {}
        others = {path: tensor for path, tensor in chosen.items() if path != _POSITIONS}
        missing = -length % self._multiple
        fills = fills_of(others, self._multiple) if missing else dict.fromkeys(others, 0)
        if positions is not None:  # padding is a document of its own
            padding = torch.arange(missing, device=positions.device, dtype=positions.dtype)
            padded = torch.cat([positions, padding.expand(*positions.shape[:-1], -1)], -1)
            parts[_POSITIONS] = self.part(padded, dim=positions.dim() - 1)
        return parts | {path: self.part(tensor, fill=fills[path]) for path, tensor in others.items()}

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

    def part(self, tensor: Tensor, *, fill: float | None = None, dim: int = 1) -> Tensor:
        """This rank's part of a whole tensor, which is filled up at its end to the multiple.

        Raises:
            DataError: It must be filled up, and nobody says with what.
        """
        missing = -tensor.shape[dim] % self._multiple
        if missing:
            fill = ignored_label(tensor) if fill is None else fill
            if fill is None:
                raise DataError(
                    f"split_sequence: {tensor.shape[dim]} positions are no multiple of {self._multiple}; say what they "
                    "are padded with: split_sequence(tensor, fill=-100) for targets, fill=0 for inputs"
                )
            tensor = functional.pad(tensor, [0, 0] * (tensor.dim() - 1 - dim) + [0, missing], value=fill)
        return self._layout.take(tensor, self._group.rank, dim)

    def _is_split(self, path: Path, length: int, tensor: Tensor) -> bool:
        """Whether a tensor is split: as the first one at its place in a batch, whatever the length of a later one."""
        fits = self._fits(path, length, tensor)
        split = self._decided.setdefault((*path, tensor.dim()), fits)
        if split and not fits:
            raise DataError(
                f"{title_of(path)} was as long as the sequence in earlier batches and split like it, and now is not: "
                f"{[*tensor.shape]} beside a sequence of {length}; name the keys that are to be split in "
                "parallel.sequence.keys"
            )
        return split

    def _fits(self, path: Path, length: int, tensor: Tensor) -> bool:
        name = path[0]
        if self._names is not None:
            return name in (*self._names, "position_ids", "shift_labels")
        if path == _POSITIONS:
            return tensor.shape[-1] == length
        return tensor.dim() >= 2 and tensor.shape[1] == length and not (tensor.dim() == 4 and "mask" in name)

    def _completed(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """The batch with what must be known of the whole sequence."""
        added: dict[str, Tensor] = {}
        whole = next((batch[name] for name in _INPUTS if isinstance(batch.get(name), Tensor)), None)
        if self._positions and whole is not None:
            by, begins = _beginnings(batch, whole)
            if batch.get("position_ids") is None:
                places = torch.arange(whole.shape[1], device=whole.device)
                added["position_ids"] = places - (places * begins).cummax(1).values
            if by in _BORDERS:
                _require_apart(by, begins, {**batch, **added})
        if whole is not None and self._masks_padding and whole.shape[1] % self._multiple:
            added |= self._mask({**batch, **added}, whole)
        labels = batch.get("labels")
        if self._shifts and isinstance(labels, Tensor) and labels.dim() == 2 and batch.get("shift_labels") is None:
            ignored = ignored_label(labels) or IGNORED
            added["shift_labels"] = functional.pad(labels[:, 1:], (0, 1), value=ignored)
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


def _by_path(batch: Any) -> dict[Path, Tensor]:
    """The tensors of a batch by their places in it."""
    items = batch.items() if isinstance(batch, Mapping) else [("", batch)]
    return {(key, number): each for key, value in items for number, each in enumerate(_tensors_of(value))}


def _tensors_of(value: Any) -> list[Tensor]:
    """In the order in which `replace_tensors` finds them."""
    found: list[Tensor] = []
    replace_tensors(value, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


def _replaced(key: str, value: Any, parts: Mapping[Path, Tensor]) -> Any:
    """A value with parts in the place of the tensors that are split."""
    numbers = count()
    return replace_tensors(value, lambda tensor: parts.get((key, next(numbers)), tensor))


def _beginnings(batch: Mapping[str, Any], whole: Tensor) -> tuple[str, Tensor]:
    """By what a batch says where documents begin, beside positions, and where: true, `[batch, sequence]`."""
    rows, length = whole.shape[:2]
    begins = torch.zeros(rows, length, dtype=torch.bool, device=whole.device)
    by = next((name for name in ("seq_lens", *_BORDERS) if isinstance(batch.get(name), Tensor)), "")
    if by == "seq_idx":
        begins[:, 1:] = batch[by].diff(dim=1) != 0
    elif by:
        ends = batch[by].to(begins.device, torch.long)  # in all rows, one behind the other
        if by == "seq_lens":
            ends = ends.reshape(rows, -1).cumsum(1) + torch.arange(rows, device=ends.device)[:, None] * length
        begins.view(-1)[ends[ends < begins.numel()]] = True
    return by, begins


def _require_apart(by: str, begins: Tensor, batch: Mapping[str, Any]) -> None:
    """Refuse documents that recurrences would keep apart, and attention would join."""
    positions, mask = batch["position_ids"], batch.get("attention_mask")
    joined = (positions if positions.dim() == _OF_ROWS else positions[0]).diff(dim=-1) == 1
    if isinstance(mask, Tensor) and mask.dim() == _OF_ROWS:
        joined = (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
    wrong = torch.nonzero(begins[:, 1:] & joined)
    if len(wrong):
        row, place = wrong[0].tolist()
        raise DataError(
            f"{by} says that a document begins at position {place + 1} of sample {row}, but attention would not keep "
            "it apart: let position_ids begin again there, or leave them out, and give no attention_mask of two "
            "dimensions"
        )


def length_of(batch: Any) -> int | None:
    """The length of the sequences: that of the inputs, else of the first tensor with two dimensions, but for a mask of
    four.
    """
    if isinstance(batch, Mapping):
        inputs = next((batch[name] for name in _INPUTS if isinstance(batch.get(name), Tensor)), None)
        if inputs is not None:
            return int(inputs.shape[1])
    return next((int(tensor.shape[1]) for tensor in tensors_in(batch) if tensor.dim() in (2, 3)), None)
