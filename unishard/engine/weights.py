"""`engine.weights`: the weights of the whole model by name, with the same meaning on every engine.

The adapter returns each rank's shard of a tensor; full tensors, norms and edits are built from shards here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unishard.checkpoint.files import path_of
from unishard.contract.adapter import ShardedModel
from unishard.contract.results import Placement
from unishard.distributed.dtypes import DTYPES
from unishard.distributed.on_ranks import on_first
from unishard.distributed.process_group import host_group
from unishard.distributed.shards import full_tensor, shard_norms
from unishard.engine.entering import entered
from unishard.engine.guards.inference_mode import without_inference_mode
from unishard.engine.loop.accumulation import Accumulation
from unishard.engine.loop.buffers import Buffers
from unishard.engine.loop.call_order import CallOrder
from unishard.engine.loop.trainable import Trainable
from unishard.engine.state.loaded_weights import names_to_load, reader_of
from unishard.engine.state.merged_adapters import MergedAdapters
from unishard.engine.state.moving_average import MovingAverage, begin_average
from unishard.engine.state.named_parameters import NamedParameters
from unishard.engine.state.streamed_names import Naming, streamed_tensors
from unishard.engine.state.tensors import StateTensors
from unishard.engine.state.unsharded import unsharded
from unishard.engine.state.weight_stream import stream_weights
from unishard.engine.training_only import require_training
from unishard.errors import ContractError

_BUCKET = 1 << 28
"""Bytes."""


@entered
class Weights:
    """Reads, replaces, freezes and averages the weights of a prepared model; `engine.weights`.

    Every method except `placement` is collective. Names are those of `engine.module.named_parameters()`; a tied
    parameter has several, each of which works.
    """

    def __init__(
        self,
        adapter: ShardedModel,
        order: CallOrder,
        parameters: NamedParameters,
        tensors: StateTensors,
        trainable: Trainable,
        buffers: Buffers,
        accumulation: Accumulation | None,
    ) -> None:
        """Called by `unishard.prepare`."""
        self._adapter = adapter
        self._device = adapter.device
        self._order = order
        self._parameters = parameters
        self._tensors = tensors
        self._trainable = trainable
        self._buffers = buffers
        self._accumulation = accumulation

    # -- by name -----------------------------------------------------------------------------------

    @torch.no_grad()
    def read(self, name: str) -> Tensor:
        """Read a master weight, at any time. Collective.

        Args:
            name: Of the parameter.

        Returns:
            A full copy on `engine.device`, in fp32, or complex64 if it is complex; for a frozen parameter a copy of
            what the engine keeps, which may be rounded to `precision.compute`.

        Raises:
            ContractError: There is no such parameter.
        """
        return full_tensor(self._adapter.master_shard(self._parameters.find("weights.read", name)), self._device)

    @torch.no_grad()
    def write(self, name: str, value: Tensor) -> None:
        """Replace a master weight and every copy that the engine computes with. Collective.

        Args:
            name: Of the parameter.
            value: The full tensor, any floating dtype and device. Rank 0's value is used; every rank must pass one.

        Raises:
            ContractError: There is no such parameter, `value` does not fit it, or a forward waits for its backward.
        """
        parameter = self._parameters.find("weights.write", name)
        self._order.require("weights.write")
        self._parameters.replace("weights.write", name, parameter, value)

    @without_inference_mode
    @contextmanager
    def gathered(self, names: Iterable[str]) -> Iterator[dict[str, Tensor]]:
        """Edit several master weights: on exit the tensors are written back, as with `write`. Collective.

        Rank 0's edits are used, none after an exception inside the block. To use weights in a loss, see `unsharded`.

        Args:
            names: Of the parameters; all these are in memory at once on every rank.

        Yields:
            Full fp32 tensors without a graph by name, on `engine.device`; tied names share one tensor. Edit them in
            place.

        Raises:
            ContractError: There is no such parameter, a tensor was replaced by one that does not fit, or a forward
                waits for its backward.
        """
        call = "weights.gathered"
        if isinstance(names, str):
            raise ContractError(f"{call} needs a list of names, got {names!r}; write gathered([{names!r}])")
        parameters = {name: self._parameters.find(call, name) for name in names}
        self._order.require(call)
        full: dict[nn.Parameter, Tensor] = {}
        with torch.no_grad():
            for parameter in parameters.values():
                if parameter not in full:
                    full[parameter] = full_tensor(self._adapter.master_shard(parameter), self._device)
        tensors = {name: full[parameter] for name, parameter in parameters.items()}
        yield tensors
        self._order.require(call)
        if tensors.keys() != parameters.keys():
            raise ContractError(f"{call}: names were added to or removed from the dict; only edit its tensors")
        edited = {parameter: name for name, parameter in parameters.items() if tensors[name] is not full[parameter]}
        names_of = {parameter: name for name, parameter in parameters.items()} | edited
        self._order.ranks.check_now(call, ", writing back")
        with torch.no_grad():
            for parameter, name in names_of.items():
                self._parameters.replace(call, name, parameter, tensors[name])

    def unsharded(self, names: Iterable[str]) -> AbstractContextManager[dict[str, nn.Parameter]]:
        """Use full weights, which autograd knows, outside the forward of their modules. Collective.

        For a fused loss that takes `lm_head.weight`, a penalty on weights, or an output projection with the embedding's
        weight. Put the forward and its backward into the block, and `step` after it. To edit weights, see `gathered`.

        Args:
            names: Of the parameters; all these, and those that are gathered with them, are in memory at once on every
                rank.

        Yields:
            The parameters by name, as the model's modules have them in the block, and valid only there: full, in the
            dtype that the model computes with. Tied names share one parameter.

        Raises:
            ContractError: There is no such parameter, a parameter was edited, the block ends before a backward that
                needs it, or it is inside another one.
        """
        return unsharded(self._parameters, self._adapter, self._order, names)

    @torch.no_grad()
    def norms(self) -> dict[str, float]:
        """L2 norm of each master weight, frozen ones too, at any time. Collective.

        One all-reduce of one number per parameter; nothing is gathered.

        Returns:
            Norms by name, fp32 accuracy, the same on every rank; a tied parameter under its first name.
        """
        self._order.require_open("weights.norms")
        self._order.ranks.check_now("weights.norms")
        return shard_norms(
            {name: self._adapter.master_shard(parameter) for name, parameter in self._tensors.each()}, self._device
        )

    # -- the whole model ---------------------------------------------------------------------------

    @torch.no_grad()
    def state_dict(self, *, dtype: str | None = None, all_ranks: bool = False) -> dict[str, Tensor]:
        """Read all weights and persistent buffers into host memory, a bucket at a time. Collective, at any time.

        Args:
            dtype: `fp32`, `bf16` or `fp16`, for floating-point tensors; what a class of transformers keeps in fp32 is
                fp32. None for the master weights as they are.
            all_ranks: Whether every rank gets them; each then holds the whole model in host memory.

        Returns:
            Full tensors by name, as the unsharded model's `state_dict`, on rank 0; empty on the others unless
            `all_ranks` is set. Tied names share one tensor.

        Raises:
            ContractError: There is no such dtype.
        """
        self._order.require_open("weights.state_dict")
        _require_dtype("weights.state_dict", dtype)
        self._order.ranks.check_now("weights.state_dict", f", {dtype}, all_ranks={all_ranks}")
        keeps, tensors = all_ranks or dist.get_rank() == 0, dict[str, Tensor]()
        for name, full in self._in_buckets(dtype, merged=False, names="model", bucket_bytes=_BUCKET):
            if keeps:
                tensors[name] = torch.empty_like(full, device="cpu").copy_(full)
        return tensors | {name: tensors[first] for name, first in self._tensors.ties().items() if keeps}

    @torch.no_grad()
    def load(self, source: Mapping[str, Tensor] | str | Path | None, *, strict: bool = True) -> None:
        """Replace all weights, and every copy that the engine computes with, one at a time. Collective.

        The optimizer's state stays, and so do schedule and step count: to continue a run, see `Engine.load`.

        Args:
            source: Full tensors by name, as `state_dict` returns them, or a directory with safetensors in the layout of
                `save_pretrained`. Rank 0's is used; the others may pass None.
            strict: Whether every name must match; if not, what matches is loaded.

        Raises:
            CheckpointError: On every rank, before anything is changed: a name is missing or unknown, a shape differs,
                or the files cannot be read.
            ContractError: Inside an accumulation window or `unsharded`.
        """
        call = "weights.load"
        self._order.require(call)
        self._order.ranks.check_now(call, f", strict={strict}")
        source = path_of(source, call) if isinstance(source, str | Path) else source
        shapes: dict[str, torch.Size] = {
            name: self._adapter.master_shard(parameter).shape for name, parameter in self._tensors.named.items()
        }
        buffers = {name: each for name, each in self._tensors.buffers().items() if name not in shapes}
        shapes |= {name: buffer.shape for name, buffer in buffers.items()}
        names = on_first(host_group(), lambda: names_to_load(source, shapes, self._tensors.ties(), strict=strict))
        read = reader_of(source) if dist.get_rank() == 0 else None
        for name in names:
            value = torch.empty(shapes[name]) if read is None else read(name)
            if name in buffers:
                full = torch.empty_like(buffers[name]).copy_(value)
                dist.broadcast(full, src=0)
                buffers[name].copy_(full)
            else:
                self._parameters.replace(
                    call, name, self._tensors.named[name], value if value.is_complex() else value.float()
                )
        self._buffers.begin()

    def stream(
        self, *, dtype: str | None = None, merged: bool = False, names: Naming = "saved", bucket_bytes: int = _BUCKET
    ) -> Iterator[tuple[str, Tensor]]:
        """Stream all weights and persistent buffers, for example to an inference server. Collective: iterate over all.

        Args:
            dtype: As in `state_dict`.
            merged: Whether to add LoRA adapters of peft to the weights that they change, under the base model's names,
                and to dequantize quantized weights; if not, these come as their bytes, in uint8.
            names: `saved` for names and shapes as `save_pretrained` writes them, such as a tensor for each expert,
                which inference servers load; `model` for those of `engine.module`, which other modules always get.
            bucket_bytes: No rank holds more than this beyond its shards, unless a single tensor is larger. One
                collective reads tensors of half of it together, while the last of those before is still in use; with
                `merged` another one reads their adapters.

        Yields:
            Name and full tensor on `engine.device`, on every rank. Tensors are views of the buffer of their bucket:
            copy what is to be kept while others go. Tied weights come once.

        Raises:
            ContractError: There is no such dtype or naming, `bucket_bytes` is not positive, `merged` finds adapters
                other than LoRA of linear layers, or `save_pretrained` would compute new tensors.
        """
        self._order.require_open("weights.stream")
        _require_dtype("weights.stream", dtype)
        if names not in get_args(Naming) or bucket_bytes < 1:
            raise ContractError(
                f"weights.stream: names must be 'saved' or 'model', and bucket_bytes positive, got {names!r} and "
                f"{bucket_bytes!r}"
            )
        return self._stream(dtype, merged, names, bucket_bytes)

    def _stream(
        self, dtype: str | None, merged: bool, names: Naming, bucket_bytes: int
    ) -> Iterator[tuple[str, Tensor]]:
        self._order.ranks.check_now("weights.stream", f", {dtype}, merged={merged}, {names}, {bucket_bytes}")
        yield from self._in_buckets(dtype, merged, names, bucket_bytes)

    @torch.no_grad()
    def _in_buckets(
        self, dtype: str | None, merged: bool, names: Naming, bucket_bytes: int
    ) -> Iterator[tuple[str, Tensor]]:
        adapters = MergedAdapters(self._adapter.module) if merged else None
        shards = self._tensors.by_name()
        wanted = streamed_tensors(self._adapter.module, shards, names, dtype, adapters)
        yield from stream_weights(wanted, shards, self._device, bucket_bytes, adapters)

    # -- what trains -------------------------------------------------------------------------------

    def set_trainable(self, names: str | Iterable[str], trainable: bool = True) -> None:
        """Freeze parameters, or unfreeze them, from the next accumulation window on. Collective.

        As in plain torch when `requires_grad` changes and gradients are None: a frozen parameter keeps its value and
        its optimizer state, without weight decay, and one that was never trained starts with new state and its own step
        count.

        Args:
            names: Names of parameters, of modules (all their parameters) or patterns such as `*.lora_A.*`.
            trainable: False to freeze them.

        Raises:
            ContractError: Inside a window, a name matches nothing, a parameter was frozen in `prepare`, or no trainable
                one would be left.
        """
        training = require_training(self._accumulation, self._order, "weights.set_trainable")
        self._order.require("weights.set_trainable")
        self._order.ranks.check_now("weights.set_trainable")
        training.updates.set_trainable(self._trainable.choose(names, trainable), trainable)

    @without_inference_mode
    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Freeze the whole model inside the block: gradients reach inputs, but not its parameters. Collective.

        For another engine's loss that is computed through this model; this engine's window and gradients do not change.
        Keep its `backward` inside the block too, because activation checkpointing recomputes the forward there.
        """
        self._order.require("weights.frozen")
        updates = self._adapter.updates  # a model for inference is frozen
        with self._order.blocks.inside("frozen"), nullcontext() if updates is None else updates.frozen():
            yield

    def average(self, decay: float = 0.999) -> MovingAverage:
        """Keep an exponential moving average of the weights that train, from now on. Collective.

        It starts at the current weights, and each update that was not skipped makes it
        `decay * average + (1 - decay) * weights`, in fp32, in one pass over this rank's shards. `Engine.save` includes
        it. After a load, also that of `checkpoint.on_existing: resume` in `prepare`, it continues with the saved
        average of any engine and number of ranks: call this before the first training forward.

        Args:
            decay: The part of the average that an update keeps, from 0 to 1.

        Returns:
            The average: `with average.weights():` evaluates, generates and exports with it, `average.read(name)` reads
            it.

        Raises:
            CheckpointError: On every rank: the average of the loaded checkpoint cannot be read.
            ContractError: `decay` is something else, there is one already, or inside an accumulation window.
        """
        training = require_training(self._accumulation, self._order, "weights.average")
        average, training.after_update = begin_average(decay, self._adapter, self._tensors, self._order)
        return average

    def placement(self) -> Placement:
        """What this rank holds, read from its live tensors. Not collective."""
        return self._adapter.placement()

    def rounded(self, dtypes: Mapping[str, torch.dtype]) -> str | None:
        """A weight that the engine keeps in fewer bytes than these dtypes have; None if there is none."""
        kept = ((name, self._adapter.master_shard(self._tensors.named[name]).values) for name in dtypes)
        return next((name for name, values in kept if values.itemsize < dtypes[name].itemsize), None)


def _require_dtype(call: str, name: str | None) -> None:
    if name is not None and name not in DTYPES:
        raise ContractError(f"{call}: dtype must be one of {', '.join(DTYPES)} or None, got {name!r}")
