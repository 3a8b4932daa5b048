"""A model on a `DeepSpeedEngine`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unishard.contract.adapter import ShardedModel, Updates
from unishard.contract.results import Placement
from unishard.contract.units import Unit
from unishard.distributed.dtypes import name_of
from unishard.distributed.shards import Shard
from unishard_deepspeed.cases.case import ZeroCase
from unishard_deepspeed.cases.replaced_parameters import explain
from unishard_deepspeed.private.building import forget
from unishard_deepspeed.private.shown_parameters import ShownParameters
from unishard_deepspeed.private.zero_parameters import ZeroParameters
from unishard_deepspeed.sharding.gathering import is_of_shard, keep_gathered
from unishard_deepspeed.sharding.placement import parameter_bytes, units

_requires_grad = attrgetter("requires_grad")


@final
class ZeroModel(ShardedModel):
    """At stage 3 it gathers a unit for its forward and its backward; at the others parameters are full."""

    def __init__(
        self,
        zero: ZeroParameters,
        device: torch.device,
        hooks: Sequence[RemovableHandle],
        cases: Sequence[ZeroCase],
        entered: Sequence[Unit] = (),
    ) -> None:
        """Take over the engine.

        Args:
            zero: What holds the parameters.
            device: Where this rank computes.
            hooks: Hooks on the model, to remove with the engine.
            cases: Those that the run has.
            entered: Modules outside units whose parameters are gathered.
        """
        super().__init__(zero.engine.module, device)
        self.zero, self.cases = zero, cases
        self._engine, self._hooks, self._entered = zero.engine, hooks, entered
        placed = zero.placed_masters()
        self._master_dtypes = frozenset(name_of(master.dtype) for master in placed)
        self._master_numel = sum(master.numel() for master in placed)
        self.shown = ShownParameters(
            self.module, lambda parameter: cast(Updates, self.updates).read_gradient(parameter)
        )
        self.kept: dict[nn.Parameter, None] = {}
        """Parameters that stay gathered, inside `unsharded` at stage 3."""
        self.forward_is_collective = zero.gathers

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the `DeepSpeedEngine`.

        The model itself if nothing in it trains now, as in inference, or in a discriminator that the script has frozen
        for the generator's loss: DeepSpeed's hooks on the outputs would take a backward through them for their own.
        """
        trains = any(map(_requires_grad, self.zero.trained))
        for case in self.cases if trains else ():
            case.before_forward()
        try:
            with self.shown.inside_forward(show=self.updates is None or not self.module.training):
                return (self._engine if trains else self.module)(*args, **kwargs)
        except (AttributeError, RuntimeError) as error:
            explain(error, self.module)
            raise

    def gathered_modules(self) -> Iterable[Unit]:
        """At stage 3, all modules with parameters outside leaf modules."""
        return self._entered

    @contextmanager
    def unsharded(self, names: Sequence[str]) -> Iterator[None]:
        """Keep parameters gathered at stage 3; at the other stages they are full."""
        self.zero.cases.unsharded.require()
        if not self.zero.gathers or not names:
            yield
            return
        self.kept = dict.fromkeys(map(self.module.get_parameter, names))
        self.shown.hide()
        try:
            with keep_gathered(self._engine, [*self.kept]):
                self._partitioned()
                yield
        finally:
            self.kept = {}
            self._partitioned()
            self.shown.show()

    def _partitioned(self) -> None:
        for case in self.cases:
            case.partitioned()

    def reads_shard(self, error: RuntimeError) -> str | None:
        """A parameter was used that is not gathered, and so empty."""
        return "" if self.zero.gathers and is_of_shard(error) else None

    def weight_memory(self) -> list[Tensor]:
        """As DeepSpeed holds them."""
        self.zero.cases.weight_memory.require()
        return self.zero.weight_memory()

    def placement(self) -> Placement:
        """Report what the engine holds, from its live tensors."""
        return Placement(
            engine=type(self._engine).__name__,
            units=units(self._engine),
            master_dtypes=self._master_dtypes,
            master_numel=self._master_numel,
            param_bytes=parameter_bytes(self.module.parameters()),
        )

    def master_shard(self, parameter: nn.Parameter) -> Shard:
        """The shard in ZeRO's flat master weights."""
        return self.zero.master_shard(parameter)

    @torch.no_grad()
    def weights_written(self, full: Mapping[nn.Parameter, Tensor] | None = None) -> None:
        """Update the parameters in `precision.compute`, and what cases have copied."""
        if full is None:
            self.zero.copy_masters()
        for parameter, value in (full or {}).items():
            self.zero.refresh(parameter, value)
        for case in self.cases:
            case.written()
        self._partitioned()

    def reshard_all(self) -> None:
        """Reshard all gathered parameters. Collective.

        Raises:
            BackendError: This DeepSpeed lacks a private name that it needs.
        """
        if self.updates is not None:
            self.zero.cases.checkpoints.require()
        self.zero.reshard_all()
        self._partitioned()

    def close(self) -> None:
        """Destroy the `DeepSpeedEngine`, and remove the hooks from the model."""
        self.shown.hide()
        if self.updates is not None:
            self.updates.close()
        for hook in self._hooks:
            hook.remove()
        if dist.is_initialized():  # else the script has ended it, and DeepSpeed looks for its rank
            self._engine.destroy()
        forget(self._engine)
        del self._engine, self.zero, self.cases
