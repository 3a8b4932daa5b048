"""The adapter of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from unishard.contract.adapter import EngineAdapter
from unishard.contract.kit.skipping import DeviceSkip
from unishard.contract.results import Placement
from unishard.contract.trainable import set_requires_grad
from unishard.distributed.host_read import HostRead
from unishard.distributed.shards import Shard
from unishard.errors import ContractError, ModelError
from unishard_fsdp import options
from unishard_fsdp.ddp import AveragingHook
from unishard_fsdp.placement import placement_of
from unishard_fsdp.shards import shard_of
from unishard_fsdp.spec import FSDPSpec
from unishard_fsdp.torch_gradients import TorchGradients


@final
class DDPAdapter(EngineAdapter):
    """A model under DistributedDataParallel."""

    def __init__(
        self,
        spec: FSDPSpec,
        module: nn.Module,
        optimizer: Any,
        device: torch.device,
        *,
        native: options.DistributedDataParallel,
        wrap: Callable[[AveragingHook], DistributedDataParallel],
    ) -> None:
        super().__init__(module, device, optimizer)
        self._gradients = TorchGradients(
            [*self.shared_parameters.values()],
            device,
            optimizer,
            steps_always=spec.steps_always,
            copies=dist.get_world_size(),
            skip=DeviceSkip(optimizer),
        )
        if native.find_unused_parameters or native.conditional_modules:
            self.shared_parameters = {}
        self._wrap = wrap
        self._averaging = AveragingHook()
        self._replica: DistributedDataParallel | None = wrap(self._averaging)
        self._reduced = self._trainable_names()
        self._begun = False
        """Whether a backward has begun that has not ended."""
        self.forward_is_collective = native.forward_sync_buffers
        self._syncs_late = native.requires_gradient_sync == "last_micro_batch"
        self.reduces_each_backward = not self._syncs_late
        self._without_sync = ExitStack()

    def begin(self, *, last: bool) -> None:
        """Skip the all-reduce before the last micro-batch, if so configured."""
        self._averaging.finished = False
        self._without_sync.close()
        if not last and self._syncs_late:
            self._without_sync.enter_context(self._running.no_sync())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run DistributedDataParallel."""
        return self._running(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        """Run autograd, and note where it has not ended."""
        self._begun = True
        loss.backward()  # type: ignore[no-untyped-call]
        self._begun = False

    def finish_gradients(self) -> None:
        """Check that DDP has reduced every bucket.

        Raises:
            ModelError: The last backward did not reach some parameters.
        """
        # If a parameter has no gradient, its bucket is not reduced; DDP itself raises only in the next forward (torch
        # 2.13).
        if not self._averaging.finished:
            frozen = next((name for name in self._reduced if not self.module.get_parameter(name).requires_grad), None)
            if frozen is not None:
                raise ModelError(
                    f"{frozen} was frozen with requires_grad_(False) after prepare, so DistributedDataParallel did not "
                    f"reduce its bucket; call engine.weights.set_trainable({frozen!r}, False) instead"
                )
            unused = [
                name
                for name, parameter in self.module.named_parameters()
                if parameter.requires_grad and parameter.grad is None
            ]
            raise ModelError(
                f"the last backward did not reach {', '.join(unused) or 'some parameters'}, so DistributedDataParallel "
                "did not reduce their bucket; name their class in sharding.conditional_modules, set "
                "native.fsdp.find_unused_parameters to true, or freeze them before prepare"
            )

    def update(self, max_norm: float | None, divisor: float, *, finished: bool) -> tuple[HostRead, bool | None]:
        """Check that DDP has averaged the gradients, and update."""
        self.finish_gradients()
        return self._gradients.update(max_norm, divisor)

    def drop_gradients(self) -> None:
        """Drop gradients, and wrap the model again if a backward has not ended: the reducer waits for the rest."""
        self._gradients.drop()
        if self._begun:
            self._wrap_again()

    def grad_norm(self) -> Tensor:
        """The norm of the gradients, which `update` uses again."""
        return self._gradients.norm()

    def grad_shard(self, parameter: nn.Parameter, *, create: bool) -> Shard | None:
        """`parameter.grad`, full."""
        return self._gradients.shard(parameter, create=create)

    def master_shard(self, parameter: nn.Parameter) -> Shard:
        """The parameter itself, full."""
        return shard_of(parameter)

    def refresh(self, parameter: nn.Parameter, full: Tensor) -> None:
        """Do nothing: there is one copy."""

    def set_trainable(self, names: Sequence[str], trainable: bool) -> None:
        """Change `requires_grad` and wrap the model again."""
        set_requires_grad(self.module, names, trainable)
        self._wrap_again()  # its reducer expects the parameters that were trainable when it was built

    def _wrap_again(self) -> None:
        self._replica, self._begun = None, False
        self._replica = self._wrap(self._averaging)
        self._reduced = self._trainable_names()

    def _trainable_names(self) -> list[str]:
        return [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]

    def placement(self) -> Placement:
        """Report what the engine holds, from its live tensors."""
        # torch's class, also for the subclass with fixed buckets.
        engine = next(kind.__name__ for kind in type(self._running).__mro__ if kind.__module__.startswith("torch."))
        return placement_of(self.module, engine, masters=self._gradients.parameters)

    def close(self) -> None:
        """Free the gradients, and destroy the reducer."""
        self._gradients.drop()
        self._replica = None  # destroys the reducer with its hooks on the parameters

    @property
    def _running(self) -> DistributedDataParallel:
        if self._replica is None:
            raise ContractError("the engine is closed; build a new model and prepare it")
        return self._replica
