"""The weights of the whole model, one at a time: read, replaced, and streamed to whoever serves them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from unishard.checkpoint.files import path_of
from unishard.contract.adapter import InferenceAdapter
from unishard.distributed.dtypes import DTYPES, declared_by
from unishard.distributed.on_ranks import on_first
from unishard.distributed.process_group import host_group
from unishard.distributed.shards import full_tensor
from unishard.engine.loop.call_order import CallOrder
from unishard.engine.model import weight_files
from unishard.engine.state.merged_adapters import MergedAdapters
from unishard.engine.state.parameter_access import ParameterAccess
from unishard.engine.state.tensors import StateTensors
from unishard.errors import CheckpointError, ContractError

_NAMED = 5


class Weights:
    """All weights by name. Public methods implement those of `Engine` with the same names."""

    def __init__(
        self, adapter: InferenceAdapter, order: CallOrder, tensors: StateTensors, parameters: ParameterAccess
    ) -> None:
        self._adapter = adapter
        self._order = order
        self._tensors = tensors
        self._parameters = parameters

    @torch.no_grad()
    def state_dict(self, dtype: str | None, *, all_ranks: bool) -> dict[str, Tensor]:
        """Full tensors in host memory."""
        _require_dtype("state_dict", dtype)
        self._order.check_now("state_dict", f", {dtype}, all_ranks={all_ranks}")
        keeps, found = all_ranks or dist.get_rank() == 0, dict[str, Tensor]()
        for name, full in self._each(None, dtype):
            if keeps:
                found[name] = full.cpu()
        return found | {name: found[first] for name, first in self._tensors.ties().items() if keeps}

    def rounded(self, dtypes: Mapping[str, torch.dtype]) -> str | None:
        """A weight that the engine keeps in fewer bytes than these dtypes have; None if there is none."""
        held = ((name, self._adapter.master_shard(self._tensors.named[name]).values) for name in dtypes)
        return next((name for name, values in held if values.itemsize < dtypes[name].itemsize), None)

    @torch.no_grad()
    def load(self, source: Mapping[str, Tensor] | str | Path | None, *, strict: bool) -> None:
        """Replace weights and buffers by rank 0's."""
        self._order.check_now("load_weights", f", strict={strict}")
        source = path_of(source, "load_weights") if isinstance(source, str | Path) else source
        shapes: dict[str, torch.Size] = {
            name: self._adapter.master_shard(parameter).shape for name, parameter in self._tensors.named.items()
        }
        buffers = {name: each for name, each in self._tensors.buffers().items() if name not in shapes}
        shapes |= {name: buffer.shape for name, buffer in buffers.items()}
        names = on_first(host_group(), lambda: _matching(source, shapes, self._tensors.ties(), strict=strict))
        read = _reader(source) if dist.get_rank() == 0 else None
        for name in names:
            value = torch.empty(shapes[name]) if read is None else read(name)
            if name in buffers:
                full = torch.empty_like(buffers[name]).copy_(value)
                dist.broadcast(full, src=0)
                buffers[name].copy_(full)
            else:
                self._parameters.replace(
                    "load_weights", name, self._tensors.named[name], value if value.is_complex() else value.float()
                )

    @torch.no_grad()
    def stream(self, dtype: str | None, *, merged: bool) -> Iterator[tuple[str, Tensor]]:
        """Full tensors on the device, one at a time."""
        _require_dtype("weights", dtype)
        self._order.check_now("weights", f", {dtype}, merged={merged}")
        yield from self._each(MergedAdapters(self._adapter.module, self._full) if merged else None, dtype)

    def _each(self, merged: MergedAdapters | None, dtype: str | None) -> Iterator[tuple[str, Tensor]]:
        """Each parameter and persistent buffer once, under its name in the model, or in the base model of adapters.

        In this dtype, but for what the model's class keeps in fp32.
        """
        name_of = merged.name_of if merged else lambda name: name
        full_of = merged.full if merged else self._full
        kept = declared_by(self._adapter.module, dtype) if dtype else set()
        for name, _ in self._tensors.each():
            if (own := name_of(name)) is not None:
                yield own, _cast(full_of(name), "fp32" if name in kept else dtype)
        ties = self._tensors.ties()
        for name, buffer in self._tensors.buffers().items():
            if name not in ties and (own := name_of(name)) is not None:
                yield own, _cast(buffer.detach().clone(), "fp32" if name in kept else dtype)

    def _full(self, name: str) -> Tensor:
        shard = self._adapter.master_shard(self._tensors.named[name])
        full = full_tensor(shard, self._adapter.device)
        return full if shard.values.is_floating_point() or shard.values.is_complex() else full.to(shard.values.dtype)


def _require_dtype(call: str, name: str | None) -> None:
    if name is not None and name not in DTYPES:
        raise ContractError(f"{call}: dtype must be one of {', '.join(DTYPES)} or None, got {name!r}")


def _cast(full: Tensor, dtype: str | None) -> Tensor:
    return full if dtype is None or not full.is_floating_point() else full.to(DTYPES[dtype])


def _reader(source: Mapping[str, Tensor] | str | Path | None) -> Callable[[str], Tensor]:
    if isinstance(source, Mapping):
        return source.__getitem__
    folder = Path(source or "")
    files = weight_files.files_of(folder)

    def read(name: str) -> Tensor:
        with weight_files.opened(folder, files[name]) as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    return read


def _matching(
    source: Mapping[str, Tensor] | str | Path | None,
    shapes: Mapping[str, torch.Size],
    ties: Mapping[str, str],
    *,
    strict: bool,
) -> list[str]:
    """The names to load, each once.

    Raises:
        CheckpointError: Names or shapes do not match.
    """
    if source is None:
        raise CheckpointError("load_weights: rank 0 passed None; pass it the weights, or a folder with safetensors")
    if isinstance(source, Mapping):
        given = {name: tuple(value.shape) for name, value in source.items()}
    else:
        given = weight_files.shapes_of(Path(source), weight_files.files_of(Path(source)))
    wrong = [
        f"{name} has the shape {given[name]}, not {tuple(shapes[name])}"
        for name in given.keys() & shapes.keys()
        if given[name] != tuple(shapes[name])
    ]
    has = given.keys() | {name for name, first in ties.items() if first in given}
    has |= {first for name, first in ties.items() if name in given}
    if strict:
        wrong += [f"{name} is missing" for name in shapes if name not in has]
        wrong += [f"{name} is not in the model" for name in given if name not in shapes]
    if wrong:
        more = f"; and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        hint = "" if not strict else ", or strict=False"
        raise CheckpointError(f"load_weights: {'; '.join(wrong[:_NAMED])}{more}; pass weights of this model{hint}")
    first = {ties.get(name, name): name for name in reversed([*given]) if name in shapes}
    return [*first.values()]
