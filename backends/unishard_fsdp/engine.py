"""The running engines: `fully_shard` and `replicate`, which share FSDP2's machinery, and DistributedDataParallel."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import ReplicateModule  # private path; the only one in torch 2.13
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from unishard.backend import Placement
from unishard.config import Config
from unishard.engine import TrainingEngine
from unishard.engine.formats import DTYPES
from unishard.engine.inputs import cast_inputs
from unishard.engine.optimizer_state import StateSpec
from unishard.errors import ContractError, ModelError
from unishard.parts import Part
from unishard_fsdp import options
from unishard_fsdp.access import part_of
from unishard_fsdp.generation import gathering_in_generate
from unishard_fsdp.gradients import local, scale, total_norm
from unishard_fsdp.host import OnHost
from unishard_fsdp.internals import drop_unreduced, fill_unused, gathered_leaves, refresh_trainable
from unishard_fsdp.state import OptimizerState
from unishard_fsdp.whole import WholeParameters

__all__ = ["DDPEngine", "FSDPEngine"]

_MIXED = "mixed torch.Tensor and DTensor"
"""In what torch 2.13 raises when an operation meets a parameter that is not gathered (torch/distributed/tensor/_dispatch.py)."""


class TorchEngine(TrainingEngine):
    """What torch's forms of data parallelism have in common."""

    _copies: int
    """How often all ranks together hold each gradient."""

    def __init__(self, cfg: Config, module: nn.Module, optimizer: Any, device: torch.device) -> None:
        super().__init__(cfg, module, optimizer, device)
        self._trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._copies = dist.get_world_size()
        self._last = True  # torch's own default: each backward ends a window

    def _backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _update(self, max_norm: float | None, divisor: float) -> tuple[float, bool]:
        gradients = [local(parameter.grad) for parameter in self._trainable if parameter.grad is not None]
        norm = total_norm(gradients, self._device, copies=self._copies) / divisor
        value = float(norm)
        updated = math.isfinite(value) or self._cfg.training.nonfinite == "ignore"
        if updated:
            scale(gradients, norm, max_norm, divisor)
            self._step()
        for parameter in self._trainable:
            parameter.grad = None
        return value, updated

    def _step(self) -> None:
        self._optimizer.step()

    @torch.no_grad()
    def placement(self) -> Placement:
        """What the engine really holds, read off its live tensors."""
        masters = [local(parameter) for parameter in self._masters()]
        return Placement(
            engine=self._class_name(),
            units=self._units(),
            master_dtypes=frozenset(str(master.dtype).removeprefix("torch.") for master in masters),
            master_numel=sum(master.numel() for master in masters),
            param_bytes=sum(local(parameter).nbytes for parameter in self._module.parameters()),
        )

    def _stepping(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self._optimizer
        return optimizer

    @cached_property
    def _state(self) -> OptimizerState:
        return OptimizerState(self._stepping(), self._stepped())

    def _stepped(self) -> Mapping[nn.Parameter, nn.Parameter]:
        """What the optimizer steps in the place of parameters."""
        return {}

    def _settle_state(self) -> None:
        """Nothing is gathered, unless a subclass gathers."""

    def _optimizer_parts(self, parameter: nn.Parameter) -> dict[str, Part]:
        return self._state.parts(parameter)

    def _make_optimizer_state(self, specs: Mapping[nn.Parameter, StateSpec]) -> None:
        self._state.make(specs)

    def _state_loaded(self) -> None:
        """There is one copy of everything."""

    @abstractmethod
    def _class_name(self) -> str:
        """Class that runs the model."""

    def _units(self) -> tuple[str, ...]:
        return ()

    def _masters(self) -> Sequence[nn.Parameter]:
        """The trainable parameters that this rank updates."""
        return self._trainable

    def _finish_gradients(self) -> None:
        """Backward has reduced them: its last one in a window always does."""

    def _gradient_part(self, parameter: nn.Parameter, *, create: bool) -> Part | None:
        if parameter.grad is None:
            if not create:
                return None
            parameter.grad = torch.zeros_like(parameter)
        return part_of(parameter.grad)

    def _master_part(self, parameter: nn.Parameter) -> Part:
        return part_of(parameter)

    def _refresh(self, parameter: nn.Parameter, whole: Tensor) -> None:
        """There is one copy, unless a subclass keeps another."""

    def _drop_gradients(self) -> None:
        for parameter in self._trainable:
            parameter.grad = None

    def _release(self) -> None:
        for parameter in self._trainable:
            parameter.grad = None


class FSDPEngine(TorchEngine):
    """A model under `fully_shard` or `replicate`."""

    def __init__(
        self,
        cfg: Config,
        module: nn.Module,
        optimizer: Any,
        device: torch.device,
        *,
        native: options.FullyShard | options.Replicate,
        root: FSDPModule,
        whole: WholeParameters,
    ) -> None:
        super().__init__(cfg, module, optimizer, device)
        self._root = root
        self._on_host: OnHost | None = None
        if isinstance(native, options.FullyShard) and native.host_optimizer:
            self._on_host = OnHost(optimizer, pin_memory=native.host_optimizer.pin_memory and device.type == "cuda")
        self._parts = [(name, part) for name, part in module.named_modules() if isinstance(part, FSDPModule)]
        self._whole = whole
        if whole.parameters:
            fill_unused((part for _, part in self._parts), set(whole.parameters), whole.used)
        self._sharded = self._forward_is_collective = not isinstance(root, ReplicateModule)
        if isinstance(native, options.FullyShard):
            self._copies = native.mesh.replicate if native.mesh else 1
        self._syncs_late = native.requires_gradient_sync == "last_micro_batch"
        self._averages_late = isinstance(native, options.FullyShard) and native.requires_all_reduce == "last_micro_batch"
        self._reshards_late = native.reshard_after_backward == "last_micro_batch"
        # FSDP2 casts too, but passes over a UserDict such as a transformers BatchEncoding (torch 2.13, _fully_shard/_fsdp_state.py).
        casts = cfg.precision.compute != "fp32" and native.mp_policy.cast_forward_inputs
        self._hooks = cast_inputs(
            (part for part in module.modules() if casts and isinstance(part, FSDPModule)), DTYPES[cfg.precision.compute]
        )

    def _begin_micro_batch(self, *, last: bool) -> None:
        if last is self._last:
            return  # setting a flag walks all modules
        self._last = last
        if self._syncs_late:
            self._root.set_requires_gradient_sync(last)
        if self._averages_late:
            self._root.set_requires_all_reduce(last)
        if self._reshards_late:
            self._root.set_reshard_after_backward(last)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._module(*args, **kwargs)
        except RuntimeError as error:
            if _MIXED not in str(error) or not self._sharded:
                raise
            raise ModelError(
                f"the forward uses a parameter of a unit outside it, where only a part of it is there ({error}); the units are "
                f"{', '.join(self._units()[:8])}: name the classes of the blocks in sharding.units, so that what is used elsewhere, "
                "such as the weight of an embedding, stays with the root"
            ) from error

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        with gathering_in_generate(self._module):
            return super()._generate(*args, **kwargs)

    def _update(self, max_norm: float | None, divisor: float) -> tuple[float, bool]:
        self._at_rest()
        self._whole.find()
        outcome = super()._update(max_norm, divisor)
        self._whole.forget()
        return outcome

    def _finish_gradients(self) -> None:
        self._whole.find()

    def _at_rest(self) -> None:
        # A forward between backward and step leaves units gathered, and the next forward would use them as they were.
        for _, part in self._parts:
            part.reshard()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """As the contract says."""
        try:
            with super().frozen():
                yield
        finally:
            refresh_trainable(part for _, part in self._parts)

    def _leaves(self) -> list[Tensor]:
        return gathered_leaves(part for _, part in self._parts)

    def _stepped(self) -> Mapping[nn.Parameter, nn.Parameter]:
        return self._on_host.stepped if self._on_host else {}

    def _settle_state(self) -> None:
        self._at_rest()

    def _step(self) -> None:
        (self._on_host or self._optimizer).step()

    def _refresh(self, parameter: nn.Parameter, whole: Tensor) -> None:
        for _, part in self._parts:
            part.reshard()  # what is gathered was made from the old values

    def _drop_gradients(self) -> None:
        super()._drop_gradients()
        self._whole.forget()
        self._root.reset_iter_state()
        drop_unreduced(part for _, part in self._parts)

    def _set_trainable(self, names: Sequence[str], trainable: bool) -> None:
        for _, part in self._parts:
            part.reshard()  # where a unit is still gathered, its names mean copies
        super()._set_trainable(names, trainable)
        refresh_trainable(part for _, part in self._parts)

    def _release(self) -> None:
        super()._release()
        for hook in self._hooks:
            hook.remove()

    def _class_name(self) -> str:
        return (FSDPModule if self._sharded else ReplicateModule).__name__

    def _units(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self._parts if name) if self._sharded else ()


class DDPEngine(TorchEngine):
    """A model under DistributedDataParallel."""

    def __init__(
        self,
        cfg: Config,
        module: nn.Module,
        optimizer: Any,
        device: torch.device,
        *,
        native: options.DistributedDataParallel,
        wrap: Callable[[], DistributedDataParallel],
        owned: Sequence[nn.Parameter] | None = None,
    ) -> None:
        super().__init__(cfg, module, optimizer, device)
        self._owned = owned
        self._wrap = wrap
        self._replica: DistributedDataParallel | None = wrap()
        self._forward_is_collective = native.forward_sync_buffers
        self._syncs_late = native.requires_gradient_sync == "last_micro_batch"

    def _begin_micro_batch(self, *, last: bool) -> None:
        # What DDP's `no_sync` sets, without a context that forward and backward would have to share (torch 2.13).
        self._running.require_backward_grad_sync = last or not self._syncs_late

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._running(*args, **kwargs)

    def _finish_gradients(self) -> None:
        try:
            # A parameter without a gradient leaves its bucket unreduced; DDP itself says so only in the next forward (torch 2.13).
            self._running._check_reducer_finalized()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            unused = [name for name, parameter in self._module.named_parameters() if parameter.requires_grad and parameter.grad is None]
            raise ModelError(
                f"the last backward reached no gradient of {', '.join(unused) or 'some parameters'}, and DistributedDataParallel then "
                "reduces none of their bucket; name their class in sharding.whole_units, "
                "set native.fsdp.find_unused_parameters to true, or "
                "freeze them before prepare"
            ) from error

    def _update(self, max_norm: float | None, divisor: float) -> tuple[float, bool]:
        self._finish_gradients()
        return super()._update(max_norm, divisor)

    def _set_trainable(self, names: Sequence[str], trainable: bool) -> None:
        super()._set_trainable(names, trainable)
        self._replica = None  # its reducer waits for the parameters that were trainable when it was built
        self._replica = self._wrap()

    def _class_name(self) -> str:
        # torch's own class, of which the one with fixed buckets is a kind.
        return next(kind.__name__ for kind in type(self._running).__mro__ if kind.__module__.startswith("torch."))

    def _masters(self) -> Sequence[nn.Parameter]:
        return self._trainable if self._owned is None else self._owned

    def _stepping(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self._optimizer if self._owned is None else self._optimizer.optim
        return optimizer

    def _release(self) -> None:
        super()._release()
        self._replica = None  # ends the reducer, and with it its hooks on the parameters

    @property
    def _running(self) -> DistributedDataParallel:
        if self._replica is None:
            raise ContractError("the engine is closed; prepare the model again")
        return self._replica
