"""Stage 3 without training: DeepSpeed runs `DeepSpeedZeRoOffload` in place of an optimizer."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

from unishard.distributed.shards import Shard
from unishard_deepspeed.private import partitioned
from unishard_deepspeed.private.table import OF_STAGE_3
from unishard_deepspeed.private.zero_parameters import ZeroParameters
from unishard_deepspeed.spec import ZeroSpec


@final
class FrozenStage3(ZeroParameters):
    """The shards of the parameters are all that there is."""

    cases = OF_STAGE_3
    gathers = True

    def __init__(self, spec: ZeroSpec, engine: Any) -> None:
        super().__init__(spec, engine)
        if torch.cuda.is_available():
            partitioned.free_after_gathers(self.optimizer)

    def gather_after(self) -> None:
        """On the stream that gathers."""
        if torch.cuda.is_available():
            partitioned.gather_after(self.optimizer)

    def master_shard(self, parameter: nn.Parameter) -> Shard:
        """The shard of the parameter itself."""
        self.cases.master_weights.require()
        return partitioned.own_shard(parameter)

    def weight_memory(self) -> list[Tensor]:
        """Shards."""
        return partitioned.shards(self.engine.module)

    def refresh(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Only the parameter, if it is gathered now."""
        partitioned.write(parameter, value)
        self.gather_after()

    def copy_masters(self) -> None:
        """Nothing is a copy of them but what is gathered."""
        self.reshard_all()
        self.gather_after()

    def reshard_all(self) -> None:
        """By DeepSpeed."""
        self.optimizer.partition_all_parameters()
