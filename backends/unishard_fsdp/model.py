"""A model under `fully_shard`, on any device mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from unishard.config import Precision
from unishard.contract.adapter import ShardedModel
from unishard.contract.kit.input_casts import cast_inputs
from unishard.contract.results import Placement
from unishard.distributed.shards import Shard
from unishard_fsdp import options
from unishard_fsdp.cases.case import FSDPCase
from unishard_fsdp.cases.unsharded import UnshardedModules, sharded_read
from unishard_fsdp.private import PRIVATE_API
from unishard_fsdp.private.released import forget_states
from unishard_fsdp.private.shard_memory import shard_memory
from unishard_fsdp.sharding.local_shards import shard_of
from unishard_fsdp.sharding.placement import placement_of
from unishard_fsdp.spec import FSDPSpec
from unishard_fsdp.units import generation, root_first
from unishard_fsdp.units.unit_forwards import UnitForwards


@final
class FSDPModel(ShardedModel):
    """Gathers a unit for its forward and its backward."""

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        spec: FSDPSpec,
        precision: Precision,
        forwards: UnitForwards,
    ) -> None:
        super().__init__(module, device)
        self.native = native = cast(options.FullyShard | options.Replicate, spec.options)
        self.strategy, self.precision = spec.strategy, precision
        self.forwards = forwards
        self.sharded = {name: part for name, part in module.named_modules() if isinstance(part, FSDPModule)}
        """Modules with parameters of their own, the root first."""
        self.cases: list[FSDPCase] = []
        """Those that the run has now."""
        self.masters: Mapping[nn.Parameter, Tensor] = {}
        """The master weights of parameters that are no master weights themselves."""
        self.trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.kept: Sequence[Any] = ()
        """Sharded modules that stay gathered, inside `unsharded`."""
        self.reshards_late = native.reshard_after_backward == "last_micro_batch"
        self.forward_is_collective = isinstance(native, options.FullyShard)
        self._root_first = root_first.RootFirst(module, self._before_forward)
        # At the root FSDP2 casts too, but not inside a UserDict such as a BatchEncoding (torch 2.13,
        # _fully_shard/_fsdp_state.py).
        self._hooks = cast_inputs(self.modules(), precision)

    def modules(self) -> list[nn.Module]:
        """The sharded modules."""
        return [cast(nn.Module, part) for part in self.sharded.values()]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the sharded module."""
        self._before_forward()
        return self.module(*args, **kwargs)

    def _before_forward(self) -> None:
        for case in self.cases:
            case.before_forward()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run `generate` with the root's parameters gathered."""
        self._before_forward()
        self._root_first.forget()
        with generation.gathering_in_generate(self.module):
            return self.module.generate(*args, **kwargs)  # type: ignore[operator]

    def master_shard(self, parameter: nn.Parameter) -> Shard:
        """The local tensor of the parameter, or the master weight of one that is whole."""
        return shard_of(parameter, self.masters.get(parameter))

    def weights_written(self, full: Mapping[nn.Parameter, Tensor] | None = None) -> None:
        """Drop gathered copies of old values, and update what cases have copied."""
        self.reshard_all()
        for case in self.cases:
            case.written()

    def reshard_all(self) -> None:
        """Reshard every unit."""
        for case in self.cases:
            case.before_reshard()
        # A forward between backward and step leaves units gathered, and the next forward would use the old values.
        for part in self.sharded.values():
            part.reshard()
        for case in self.cases:
            case.after_reshard()

    @contextmanager
    def unsharded(self, names: Sequence[str]) -> Iterator[None]:
        """Keep the modules that hold these parameters gathered."""
        self._root_first.run()
        case = UnshardedModules(self.module, names)
        self.kept = case.modules
        self.cases.append(case)
        try:
            with case.gathered(reshards=not self.reshards_late):
                yield
        finally:
            self.cases.remove(case)
            self.kept = ()

    def reads_shard(self, error: RuntimeError) -> str | None:
        """A shard, which is a DTensor, was used with a full tensor."""
        return sharded_read(error, self._units())

    def weight_memory(self) -> list[Tensor]:
        """Shards, as FSDP2 gathers them, as the parameters have them, and as they are stepped."""
        PRIVATE_API["shard-memory"].require()
        stepped = [] if self.updates is None else self.updates.stepped()
        return [*shard_memory(self.modules()), *stepped]

    def placement(self) -> Placement:
        """Report what the engine holds, from its live tensors."""
        masters = [self.masters.get(parameter, parameter) for parameter in self.trained]
        return placement_of(self.module, FSDPModule.__name__, units=self._units(), masters=masters)

    def _units(self) -> tuple[str, ...]:
        return tuple(filter(None, self.sharded)) if isinstance(self.native, options.FullyShard) else ()

    def releasing(self) -> Callable[[], None]:
        """Let torch forget that it has sharded the modules."""
        PRIVATE_API["released-modules"].require()
        return partial(forget_states, [*self.module.modules()])

    def close(self) -> None:
        """Remove the hooks from the model; torch's stay with it."""
        if self.updates is not None:
            self.updates.close()
        for case in self.cases:
            case.close()
        self._root_first.forget()
        self.forwards.close()
        for hook in self._hooks:
            hook.remove()
