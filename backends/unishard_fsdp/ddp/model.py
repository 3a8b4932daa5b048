"""A model under DistributedDataParallel, and its updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from unishard.contract.adapter import ShardedModel, Updates
from unishard.contract.kit.skipping import DeviceSkip
from unishard.contract.results import Placement
from unishard.contract.trainable import set_requires_grad
from unishard.distributed.host_read import HostRead
from unishard.distributed.shards import Shard
from unishard.errors import ContractError, ModelError
from unishard_fsdp import options
from unishard_fsdp.ddp.averaging import AveragingHook
from unishard_fsdp.gradients.torch_gradients import TorchGradients
from unishard_fsdp.sharding.local_shards import shard_of
from unishard_fsdp.sharding.placement import placement_of
from unishard_fsdp.spec import FSDPSpec


@final
class DDPModel(ShardedModel):
    """Each rank holds the whole model."""

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        native: options.DistributedDataParallel,
        wrap: Callable[[AveragingHook], DistributedDataParallel],
    ) -> None:
        super().__init__(module, device)
        self.trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._wrap = wrap
        self.averaging = AveragingHook()
        self._replica: DistributedDataParallel | None
        self.wrap_again()
        self.forward_is_collective = native.forward_sync_buffers

    def wrap_again(self) -> None:
        """Build the reducer anew: it expects gradients of the parameters that are trainable then."""
        self._replica = None
        self._replica = self._wrap(self.averaging)
        self.reduced = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]
        """Names of these parameters."""

    @property
    def running(self) -> DistributedDataParallel:
        """The wrapped model."""
        if self._replica is None:
            raise ContractError("the engine is closed; build a new model and prepare it")
        return self._replica

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run DistributedDataParallel."""
        return self.running(*args, **kwargs)

    def master_shard(self, parameter: nn.Parameter) -> Shard:
        """The parameter itself, full."""
        return shard_of(parameter)

    def placement(self) -> Placement:
        """Report what the engine holds, from its live tensors."""
        # torch's class, also for the subclass with fixed buckets.
        engine = next(kind.__name__ for kind in type(self.running).__mro__ if kind.__module__.startswith("torch."))
        return placement_of(self.module, engine, masters=self.trained)

    def close(self) -> None:
        """Free the gradients, and destroy the reducer with its hooks on the parameters."""
        if self.updates is not None:
            self.updates.close()
        self._replica = None


@final
class DDPUpdates(Updates):
    """Gradients that DistributedDataParallel averages in backward, and the optimizer."""

    model: DDPModel

    def __init__(
        self, model: DDPModel, spec: FSDPSpec, native: options.DistributedDataParallel, optimizer: torch.optim.Optimizer
    ) -> None:
        super().__init__(model, optimizer)
        self._gradients = TorchGradients(
            model.trained,
            model.device,
            optimizer,
            steps_always=spec.steps_always,
            copies=dist.get_world_size(),
            skip=DeviceSkip(optimizer),
        )
        if native.find_unused_parameters or native.conditional_modules:
            self.shared_parameters = {}
        self._begun = False
        """Whether a backward has begun that has not ended."""
        self._syncs_late = native.requires_gradient_sync == "last_micro_batch"
        self.reduces_each_backward = not self._syncs_late
        self._without_sync = ExitStack()

    def begin(self, *, last: bool) -> None:
        """Skip the all-reduce before the last micro-batch, if so configured."""
        self.model.averaging.finished = False
        self._without_sync.close()
        if not last and self._syncs_late:
            self._without_sync.enter_context(self.model.running.no_sync())

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
        if not self.model.averaging.finished:
            frozen = next(
                (name for name in self.model.reduced if not self.model.module.get_parameter(name).requires_grad), None
            )
            if frozen is not None:
                raise ModelError(
                    f"{frozen} was frozen with requires_grad_(False) after prepare, so DistributedDataParallel did not "
                    f"reduce its bucket; call engine.weights.set_trainable({frozen!r}, False) instead"
                )
            unused = [
                name
                for name, parameter in self.model.module.named_parameters()
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

    def set_trainable(self, names: Sequence[str], trainable: bool) -> None:
        """Change `requires_grad` and wrap the model again."""
        set_requires_grad(self.model.module, names, trainable)
        self._wrap_again()

    def _wrap_again(self) -> None:
        self._begun = False
        self.model.wrap_again()

    def close(self) -> None:
        """Free the gradients."""
        self._gradients.drop()
