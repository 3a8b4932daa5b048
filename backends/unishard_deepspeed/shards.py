"""Shards of a DeepSpeed engine's gradients and master weights, by model parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from unishard.contract.optimizer_state import StateSpec, fresh_state, tensors_and_numbers
from unishard.distributed.dtypes import name_of
from unishard.distributed.shards import Shard
from unishard_deepspeed.flat_master_weights import FlatMasterWeights, FlatShard, InnerOptimizer
from unishard_deepspeed.private import shards
from unishard_deepspeed.private.optimizer_kind import Kind, require
from unishard_deepspeed.private.second_copy import second_shard
from unishard_deepspeed.private.state import gather_after, groups_of_masters, unlink_states
from unishard_deepspeed.spec import ZeroSpec


def give_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Stage 0: create zero gradients in fp32 for parameters without one that accumulate in fp32.

    DeepSpeed would create them in the parameter's dtype, and reduce them apart from those of ranks that used the
    parameter (DeepSpeed 0.19.8, runtime/engine.py, _get_gradients_for_reduction).
    """
    for parameter in parameters:
        if parameter.grad is None and parameter.grad_dtype is None:
            parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)


class Shards:
    """Shards of a window's gradients and of the master weights, at every stage."""

    def __init__(self, spec: ZeroSpec, engine: Any, inner: InnerOptimizer) -> None:
        self._engine = engine
        self._inner = inner
        self._kind = spec.kind
        self._offloads = spec.offloads_optimizer
        self._gradients: dict[nn.Parameter, Shard] | None = None
        """Gradient shards, once reduced in this window."""
        self._required = False

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce the gradients before `engine.step()` does. Collective.

        Raises:
            BackendError: DeepSpeed lacks a private name for it.
        """
        if not self._required:
            require("gradients", self._kind)
            self._required = True
        if self._kind == "stage-0":
            give_gradients(self._inner.trained)
        shards.reduce_gradients(self._engine)
        self._finish_copies()
        self._gradients = shards.gradient_shards(self._engine, self._inner, self._kind)

    def gradient(self, parameter: nn.Parameter) -> Shard | None:
        """This rank's shard of a gradient, after `reduce`."""
        return None if self._gradients is None else self._gradients.get(parameter)

    def master(self, parameter: nn.Parameter) -> Shard:
        """This rank's shard of a master weight.

        Raises:
            BackendError: DeepSpeed lacks a private name for it.
        """
        require("master-weights", self._kind)
        return shards.master_shard_of(self._engine.optimizer, self._inner, parameter, self._kind)

    def refresh(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Update a parameter to its edited master weight."""
        shards.update_low_precision_copy(parameter, value, self._kind)
        gather_after(self._engine.optimizer, self._kind)

    @contextmanager
    def finished(self) -> Iterator[None]:
        """A block in which `engine.step()` uses the gradients as they are, if `reduce` was called."""
        if self._gradients is None:
            yield
            return
        self._gradients = None
        if self._offloads:
            shards.measure_offloaded(self._engine.optimizer, self._inner, self._kind)
        with shards.already_reduced(self._engine):
            yield

    @torch.no_grad()
    def drop(self) -> None:
        """Drop the window's gradients.

        Raises:
            BackendError: DeepSpeed lacks a private name for it.
        """
        require("discard", self._kind)
        self._gradients = None
        self._finish_copies()
        shards.drop_gradients(self._engine, self._kind)

    def _finish_copies(self) -> None:
        """Wait for gradients that DeepSpeed copies to pinned host memory asynchronously.

        (DeepSpeed 0.19.8, runtime/zero/stage3.py, _offload_grad_partition_at_boundary; runtime/zero/stage_1_and_2.py,
        async_inplace_copy_grad_to_fp32_buffer_from_gpu.)
        """
        if self._offloads and torch.cuda.is_available():
            torch.cuda.synchronize()


# -- What a DeepSpeed engine holds, from its live tensors ------------------------------------------


class MasterWeights:
    """Dtypes and number of elements of the master weights on this rank, which do not change."""

    def __init__(self, kind: Kind, inner: InnerOptimizer) -> None:
        masters = _local_shards(inner.trained) if kind == "stage-3" else inner.masters
        self.dtypes = frozenset(name_of(master.dtype) for master in masters)
        self.numel = sum(master.numel() for master in masters)


def _local_shards(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    from deepspeed.utils import safe_get_local_fp32_param

    return [torch.empty_like(safe_get_local_fp32_param(parameter), device="meta") for parameter in parameters]


def units(engine: Any) -> tuple[str, ...]:
    """Names of the modules whose parameters stage 3 gathers together; no other stage reads the flag
    (utils/z3_leaf_module.py).
    """
    if engine.zero_optimization_stage() != 3:
        return ()
    from deepspeed.utils import get_z3_leaf_modules

    leaves = set(get_z3_leaf_modules(engine.module))
    return tuple(name for name, module in engine.module.named_modules() if module in leaves)


def parameter_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of parameters on this rank: gathered ones, its shard, `ds_tensor` (DeepSpeed's page on ZeRO), and of a
    second copy.
    """
    return sum(tensor.numel() * tensor.element_size() for parameter in parameters for tensor in _held(parameter))


def _held(parameter: nn.Parameter) -> Iterator[Tensor]:
    yield parameter.data
    if hasattr(parameter, "ds_tensor"):
        yield parameter.ds_tensor
    if (copy := second_shard(parameter)) is not None:
        yield copy


# -- Optimizer state by model parameter, although it is stored by flat master weight ---------------


class ZeroOptimizerState:
    """Reads optimizer state as shards, and recreates it."""

    def __init__(
        self, optimizer: Any, inner: InnerOptimizer, masters: FlatMasterWeights, access: Shards, kind: Kind
    ) -> None:
        """Hold the optimizers.

        Args:
            optimizer: DeepSpeed's optimizer.
            inner: The torch optimizer inside it.
            masters: The flat master weights of the torch optimizer, and how they are split.
            access: Returns this rank's shard of a master weight.
            kind: The kind of DeepSpeed optimizer.
        """
        self._optimizer = optimizer
        self._inner = inner
        self._torch = inner.optimizer
        self._masters = masters
        self._access = access
        self._kind = kind

    @cached_property
    def _groups(self) -> dict[Tensor, dict[str, Any]]:
        return groups_of_masters(self._optimizer, self._inner, self._kind)

    @cached_property
    def _places(self) -> dict[nn.Parameter, tuple[Tensor, FlatShard]]:
        """The flat master weight and the shard of each parameter."""
        return {shard.parameter: (master, shard) for master, shards in self._masters.shards.items() for shard in shards}

    def shards(self, parameter: nn.Parameter) -> dict[str, Shard]:
        """This rank's shards of a parameter's state: live memory, and numbers as 0-d fp32 copies; empty if it holds
        nothing.
        """
        held = self._access.master(parameter)
        if parameter not in self._places or not held.values.numel():
            return {}
        master, shard = self._places[parameter]
        tensor, start = self._masters.stepped_tensor(master, shard)
        tensors, numbers = tensors_and_numbers(
            self._torch, self._groups[master], tensor, self._torch.state.get(tensor, {})
        )
        # At stage 3 a shard ends in padding, which does not belong to the parameter.
        intervals = {
            key: value if held.group is None else value.narrow(0, start, held.values.numel())
            for key, value in tensors.items()
        }
        found = {key: held._replace(values=values) for key, values in intervals.items()}
        return found | {key: Shard(torch.Size(()), number) for key, number in numbers.items()}

    def make(self, specs: Mapping[nn.Parameter, StateSpec]) -> None:
        """Clear all state and create it for some parameters; the others have none, as before their first update."""
        unlink_states(self._inner, self._kind)
        self._masters.forget()
        for master, parts in self._masters.shards.items():
            wanted = [specs.get(shard.parameter) for shard in parts]
            if any(spec != wanted[0] for spec in wanted):
                self._make_split(master, wanted)
            elif wanted[0] is not None:
                self._torch.state[master] = fresh_state(self._torch, self._groups[master], master, wanted[0])

    def _make_split(self, master: Tensor, wanted: list[StateSpec | None]) -> None:
        for view, spec in zip(self._masters.split(master), wanted, strict=True):
            if spec is not None:
                self._torch.state[view] = fresh_state(self._torch, self._groups[master], view, spec)
        self._masters.gather_state(master)
