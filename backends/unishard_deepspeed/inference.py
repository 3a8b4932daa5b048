"""The inference adapter at stage 3: DeepSpeed runs `DeepSpeedZeRoOffload` in place of an optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unishard.contract.adapter import InferenceAdapter
from unishard.contract.results import Placement
from unishard.distributed.shards import Shard
from unishard_deepspeed.cases.case import ZeroCase
from unishard_deepspeed.cases.replaced_parameters import explain
from unishard_deepspeed.gathering import is_of_shard, keep_gathered
from unishard_deepspeed.placement import parameter_bytes, units
from unishard_deepspeed.private import partitioned
from unishard_deepspeed.private.building import forget
from unishard_deepspeed.private.shown_parameters import ShownParameters
from unishard_deepspeed.private.table import OF_STAGE_3


@final
class DeepSpeedInferenceAdapter(InferenceAdapter):
    """Gathers a unit for its forward and reshards it afterwards."""

    def __init__(
        self, engine: Any, device: torch.device, hooks: Sequence[RemovableHandle], cases: Sequence[ZeroCase]
    ) -> None:
        super().__init__(engine.module, device)
        self._engine, self._cases = engine, cases
        self._hooks = hooks
        """Hooks on the model, removed with the engine."""
        self._shown = ShownParameters(engine.module, lambda parameter: None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, whose hooks gather parameters."""
        # Not the engine, which would treat a backward through the outputs as its own (runtime/engine.py, forward).
        try:
            with self._shown.inside_forward():
                return self.module(*args, **kwargs)
        except (AttributeError, RuntimeError) as error:
            explain(error, self.module)
            raise

    @contextmanager
    def unsharded(self, names: Sequence[str]) -> Iterator[None]:
        """Keep parameters gathered."""
        if not names:
            yield
            return
        OF_STAGE_3.unsharded.require()
        try:
            with keep_gathered(self._engine, [self.module.get_parameter(name) for name in names]):
                self._partitioned()
                yield
        finally:
            self._partitioned()

    def _partitioned(self) -> None:
        for case in self._cases:
            case.partitioned()

    def reads_shard(self, error: RuntimeError) -> str | None:
        """A parameter was used that is not gathered, and so empty."""
        return "" if is_of_shard(error) else None

    def placement(self) -> Placement:
        """Report what the engine holds, from its live tensors."""
        return Placement(
            engine=type(self._engine).__name__,
            units=units(self._engine),
            master_dtypes=frozenset(),
            master_numel=0,
            param_bytes=parameter_bytes(self.module.parameters()),
        )

    def master_shard(self, parameter: nn.Parameter) -> Shard:
        """The shard of the parameter itself."""
        OF_STAGE_3.master_weights.require()
        return partitioned.own_shard(parameter)

    def refresh(self, parameter: nn.Parameter, full: Tensor) -> None:
        """Update the partitioned parameter, in `precision.compute`."""
        partitioned.write(parameter, full)
        self.loaded()
        if torch.cuda.is_available():
            partitioned.gather_after(self._engine.optimizer)

    def loaded(self) -> None:
        """Update what cases have copied."""
        for case in self._cases:
            case.written()
        self._partitioned()

    def close(self) -> None:
        """Destroy the `DeepSpeedEngine`, and remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()
        self._engine.destroy()
        forget(self._engine)
        del self._engine
