"""What the rest of the backend asks of the parameters of a DeepSpeed engine, which trains or does not."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from unishard.distributed.shards import Shard
from unishard.distributed.slices import own_part
from unishard_deepspeed.private.table import Cases
from unishard_deepspeed.spec import ZeroSpec


class ZeroParameters(ABC):
    """The parameters in one engine. A method with a default does what is right where every rank holds them whole."""

    cases: ClassVar[Cases]
    """The private names that it needs, by case."""
    gathers: ClassVar[bool] = False
    """Whether parameters are sharded, and gathered for each module."""
    trained: Sequence[nn.Parameter] = ()
    """Those that are updated."""

    def __init__(self, spec: ZeroSpec, engine: Any) -> None:
        """Take what `deepspeed.initialize` has made.

        Args:
            spec: What was built.
            engine: The `DeepSpeedEngine`.
        """
        self.spec, self.engine = spec, engine
        self.optimizer = engine.optimizer

    def placed_masters(self) -> list[Tensor]:
        """Tensors of the dtypes and sizes of the master weights on this rank."""
        return []

    def weight_memory(self) -> list[Tensor]:
        """All tensors that have the memory of the weights on this rank."""
        return []

    def gather_after(self) -> None:  # noqa: B027 (nothing is gathered)
        """Let the next gathers wait on the device for the shards that were written just now."""

    @abstractmethod
    def master_shard(self, parameter: nn.Parameter) -> Shard:
        """This rank's shard of a master weight, or of the parameter if it was frozen in `prepare`.

        Raises:
            BackendError: DeepSpeed lacks a private name for it.
        """

    def refresh(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Update the copy that the model computes with to an edited master weight; every rank has the full value."""
        parameter.data.copy_(own_part(parameter, value))

    @abstractmethod
    def copy_masters(self) -> None:
        """Update the copies that the model computes with from the master weights, as after an update. Collective."""

    def reshard_all(self) -> None:  # noqa: B027 (nothing is gathered)
        """Reshard all parameters, also those kept between forwards; the next forward gathers them. Collective."""
