"""The running engine of FSDP2, on any device mesh."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from unishard.config import Config
from unishard.engine.model.dtypes import DTYPES
from unishard.engine.model.inputs import cast_inputs
from unishard.errors import ContractError, ModelError
from unishard_fsdp import options
from unishard_fsdp.conditional import ConditionalParameters
from unishard_fsdp.engine import TorchEngine
from unishard_fsdp.generation import gathering_in_generate
from unishard_fsdp.host_optimizer import OnHost
from unishard_fsdp.patches import PATCHES
from unishard_fsdp.unreduced_gradients import UnreducedGradients

__all__ = ["FSDPEngine"]

_MIXED = "mixed torch.Tensor and DTensor"
"""In what torch 2.13 raises when an operation meets a parameter that is not gathered (torch/distributed/tensor/_dispatch.py)."""

_DISCARD, _DTYPES, _FOREIGN = PATCHES["discard"], PATCHES["trainable-dtypes"], PATCHES["foreign-backward"]

_logger = logging.getLogger("unishard")


class FSDPEngine(TorchEngine):
    """A model under `fully_shard`."""

    def __init__(
        self,
        cfg: Config,
        module: nn.Module,
        optimizer: Any,
        device: torch.device,
        *,
        native: options.FullyShard | options.Replicate,
        root: FSDPModule,
        whole: ConditionalParameters,
    ) -> None:
        super().__init__(cfg, module, optimizer, device)
        self._root = root
        self._on_host: OnHost | None = None
        if isinstance(native, options.FullyShard) and native.host_optimizer:
            self._on_host = OnHost(optimizer, pin_memory=native.host_optimizer.pin_memory and device.type == "cuda")
        self._parts = [(name, part) for name, part in module.named_modules() if isinstance(part, FSDPModule)]
        self._sharded = self._forward_is_collective = isinstance(native, options.FullyShard)
        if isinstance(native, options.FullyShard):
            self._copies = native.mesh.replicate if native.mesh else 1
        self._mixed = cfg.precision.compute != "fp32"
        self._ran = False
        self._syncs_late = native.requires_gradient_sync == "last_micro_batch"
        self._averages_late = averages_late(native)
        self._reshards_late = native.reshard_after_backward == "last_micro_batch"
        self._unreduced = UnreducedGradients(self._modules(), waits=self._syncs_late, mixed=self._mixed, between_groups=self._averages_late)
        self._whole = whole
        if whole.parameters:
            from unishard_fsdp.patches.conditional import fill_unused

            self._unreduced.patch_all()
            fill_unused(self._modules(), set(whole.parameters), whole.used)
        # FSDP2 casts too, but passes over a UserDict such as a transformers BatchEncoding (torch 2.13, _fully_shard/_fsdp_state.py).
        casts = cfg.precision.compute != "fp32" and native.mp_policy.cast_forward_inputs
        self._hooks = cast_inputs(
            (part for part in module.modules() if casts and isinstance(part, FSDPModule)), DTYPES[cfg.precision.compute]
        )

    def _begin_micro_batch(self, *, last: bool) -> None:
        if last is self._last:
            return  # setting a flag walks all modules
        self._last = last
        if not last:
            self._unreduced.begin()
        if self._syncs_late:
            self._root.set_requires_gradient_sync(last)
        if self._averages_late:
            self._root.set_requires_all_reduce(last)
        if self._reshards_late:
            self._root.set_reshard_after_backward(last)

    def _backward(self, loss: Tensor) -> None:
        with self._unreduced.backward(last=self._last):
            super()._backward(loss)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        self._ran = True
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
        changes_dtypes = self._mixed and not self._ran
        if changes_dtypes:
            _DTYPES.require()
        try:
            with super().frozen():
                yield
        finally:
            if changes_dtypes:
                self._refresh_trainable()

    def _refresh_trainable(self) -> None:
        from unishard_fsdp.patches.leaves import refresh_trainable

        if _DTYPES.needed:
            refresh_trainable(self._modules())

    def _leaves(self) -> list[Tensor]:
        if not _FOREIGN.works:
            raise ContractError(_FOREIGN.refusal())
        from unishard_fsdp.patches.leaves import gathered_leaves

        return gathered_leaves(self._modules())

    def _modules(self) -> list[nn.Module]:
        return [cast(nn.Module, part) for _, part in self._parts]

    def _stepped(self) -> Mapping[nn.Parameter, nn.Parameter]:
        return self._on_host.stepped if self._on_host else {}

    def _settle_state(self) -> None:
        self._at_rest()

    def _step(self) -> None:
        (self._on_host or self._optimizer).step()

    def _refresh(self, parameter: nn.Parameter, whole: Tensor) -> None:
        self._at_rest()  # what is gathered was made from the old values

    def _drop_gradients(self) -> None:
        if self._syncs_late or self._averages_late:
            _DISCARD.require()
        super()._drop_gradients()
        self._whole.forget()
        self._unreduced.forget()
        if hasattr(self._root, "reset_iter_state"):  # from torch 2.13 on
            self._root.reset_iter_state()
        self._at_rest()
        if _DISCARD.needed and _DISCARD.works:
            from unishard_fsdp.patches.leaves import drop_unreduced

            drop_unreduced(self._modules())

    def _set_trainable(self, names: Sequence[str], trainable: bool) -> None:
        if self._mixed:
            _DTYPES.require()
        self._at_rest()  # where a unit is still gathered, its names mean copies
        super()._set_trainable(names, trainable)
        if self._mixed:
            self._refresh_trainable()

    def _release(self) -> None:
        super()._release()
        for hook in self._hooks:
            hook.remove()

    def _class_name(self) -> str:
        return FSDPModule.__name__

    def _units(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self._parts if name) if self._sharded else ()


def averages_late(native: options.FullyShard | options.Replicate) -> bool:
    """Whether gradients are averaged between groups only at the end of a window, where this torch can be had to do so."""
    if not isinstance(native, options.FullyShard) or native.requires_all_reduce != "last_micro_batch":
        return False
    hybrid = PATCHES["hybrid-accumulation"]
    if not hybrid.works and dist.get_rank() == 0:
        _logger.warning("%s", hybrid.refusal())
    return hybrid.works
