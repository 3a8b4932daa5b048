"""The inference adapter for a model under `fully_shard`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from unishard.config import Precision
from unishard.contract.adapter import InferenceAdapter
from unishard.contract.kit.input_casts import cast_inputs
from unishard.contract.results import Placement
from unishard.distributed.shards import Shard
from unishard_fsdp.cases.unsharded import UnshardedModules, sharded_read
from unishard_fsdp.generation import gathering_in_generate
from unishard_fsdp.placement import placement_of
from unishard_fsdp.private import PRIVATE_API
from unishard_fsdp.private.released import forget_states
from unishard_fsdp.root_first import RootFirst
from unishard_fsdp.shards import shard_of
from unishard_fsdp.unit_forwards import UnitForwards


@final
class FSDPInferenceAdapter(InferenceAdapter):
    """Gathers a unit for its forward and reshards it afterwards."""

    def __init__(self, precision: Precision, module: nn.Module, device: torch.device, forwards: UnitForwards) -> None:
        super().__init__(module, device)
        self._forwards = forwards
        self._root_first = RootFirst(module)
        self._open: list[UnshardedModules] = []
        sharded = [part for part in module.modules() if isinstance(part, FSDPModule)]
        self._hooks = cast_inputs(sharded, precision)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the sharded module."""
        return self.module(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run `generate` with the root's parameters gathered."""
        self._root_first.forget()
        with gathering_in_generate(self.module):
            return self.module.generate(*args, **kwargs)  # type: ignore[operator]

    @contextmanager
    def unsharded(self, names: Sequence[str]) -> Iterator[None]:
        """Keep the modules that hold these parameters gathered."""
        self._root_first.run()
        self._open = [UnshardedModules(self.module, names)]
        try:
            with self._open[0].gathered(reshards=True):
                yield
        finally:
            self._open = []

    def reads_shard(self, error: RuntimeError) -> str | None:
        """A shard, which is a DTensor, was used with a full tensor."""
        return sharded_read(error, self.placement().units)

    def placement(self) -> Placement:
        """Report what the engine holds, from its live tensors."""
        sharded = [name for name, module in self.module.named_modules() if isinstance(module, FSDPModule)]
        engine = FSDPModule.__name__ if "" in sharded else type(self.module).__name__
        return placement_of(self.module, engine, units=[name for name in sharded if name])

    def master_shard(self, parameter: nn.Parameter) -> Shard:
        """The sharded parameter."""
        self.reshard_all()
        return shard_of(parameter)

    def refresh(self, parameter: nn.Parameter, full: Tensor) -> None:
        """Reshard, to drop gathered copies of the old value."""
        self.reshard_all()

    def reshard_all(self) -> None:
        """Reshard every unit."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        for block in self._open:
            block.after_reshard()

    def releasing(self) -> Callable[[], None]:
        """Let torch forget that it has sharded the modules."""
        PRIVATE_API["released-modules"].require()
        return partial(forget_states, [*self.module.modules()])

    def close(self) -> None:
        """Remove the hooks on inputs and outputs from the model; FSDP2's hooks stay with it."""
        self._forwards.close()
        for hook in self._hooks:
            hook.remove()
