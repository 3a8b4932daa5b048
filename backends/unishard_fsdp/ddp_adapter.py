"""The adapter of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from unishard.distributed.host_read import HostRead
from unishard.errors import ContractError, ModelError
from unishard_fsdp import options
from unishard_fsdp.adapter import TorchAdapter
from unishard_fsdp.ddp import AveragingHook
from unishard_fsdp.spec import FSDPSpec


class DDPAdapter(TorchAdapter):
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
        owned: Sequence[nn.Parameter] | None = None,
    ) -> None:
        super().__init__(spec, module, optimizer, device)
        self._owned = owned
        if owned is not None:
            self._skip = None
        self._wrap = wrap
        self._averaging = AveragingHook()
        self._replica: DistributedDataParallel | None = wrap(self._averaging)
        self._reduced = self._trainable_names()
        self._begun = False
        """Whether a backward has begun that has not ended."""
        self.forward_is_collective = native.forward_sync_buffers
        self._syncs_late = native.requires_gradient_sync == "last_micro_batch"
        self.reduces_each_backward = not self._syncs_late
        if native.find_unused_parameters or native.conditional_modules:
            self._skippable = set(self._trainable)
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
        super().backward(loss)
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
        return super().update(max_norm, divisor, finished=finished)

    def set_trainable(self, names: Sequence[str], trainable: bool) -> None:
        """Change `requires_grad` and wrap the model again."""
        super().set_trainable(names, trainable)
        self._wrap_again()  # its reducer expects the parameters that were trainable when it was built

    def drop_gradients(self) -> None:
        """Drop gradients, and wrap the model again if a backward has not ended: the reducer waits for the rest."""
        super().drop_gradients()
        if self._begun:
            self._wrap_again()

    def _wrap_again(self) -> None:
        self._replica, self._begun = None, False
        self._replica = self._wrap(self._averaging)
        self._reduced = self._trainable_names()

    def _trainable_names(self) -> list[str]:
        return [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]

    def _class_name(self) -> str:
        # torch's class, also for the subclass with fixed buckets.
        return next(kind.__name__ for kind in type(self._running).__mro__ if kind.__module__.startswith("torch."))

    def _masters(self) -> Sequence[nn.Parameter]:
        return self._trainable if self._owned is None else self._owned

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer inside a ZeroRedundancyOptimizer."""
        optimizer: torch.optim.Optimizer = self.optimizer if self._owned is None else self.optimizer.optim
        return optimizer

    def close(self) -> None:
        """Destroy the reducer."""
        super().close()
        self._replica = None  # destroys the reducer with its hooks on the parameters

    @property
    def _running(self) -> DistributedDataParallel:
        if self._replica is None:
            raise ContractError("the engine is closed; build a new model and prepare it")
        return self._replica
