"""Everything that a run needs to go on, as tensors in parts: what checkpoints are written from and read into."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from torch import Tensor, nn

from unishard.checkpoint import keys
from unishard.checkpoint.lazy_shards import LazyShard, lazy_shard_of
from unishard.distributed.shards import Shard
from unishard.engine.loop.trainable import Freezing
from unishard.engine.optim.optimizer_state import StateSpec
from unishard.engine.state.parameter_access import ParameterAccess

__all__ = ["TrainingState"]


class TrainingState(ParameterAccess):
    """Says what this rank holds of the parameters, the buffers and the optimizer's state. `TrainingEngine` inherits it."""

    _module: nn.Module
    _freezing: Freezing

    # -- what an engine supplies ------------------------------------------------------------------------------------------

    @abstractmethod
    def _settle_state(self) -> None:
        """Between two updates, before state is read or written: let nothing be gathered, so that parts are all there is. Collective."""

    @abstractmethod
    def _optimizer_parts(self, parameter: nn.Parameter) -> dict[str, Shard]:
        """What this rank holds of the optimizer's state of a parameter, by the optimizer's own keys.

        Live memory where a tensor has the parameter's shape. A number, such as a step count, is a part of shape () with a copy in
        fp32 in host memory. Empty for a parameter that has never been updated, and where this rank holds nothing of it.
        """

    @abstractmethod
    def _make_optimizer_state(self, specs: Mapping[nn.Parameter, StateSpec]) -> None:
        """Forget all of the optimizer's state and make that of these parameters anew: zeros, and the numbers as given."""

    @abstractmethod
    def _state_loaded(self) -> None:
        """Masters, frozen parameters and optimizer state were written in place: bring up every other copy of them. Collective."""

    # -- what every engine is ---------------------------------------------------------------------------------------------

    def _model_parts(self) -> dict[str, Shard]:
        """Parameters and persistent buffers, each once, by their names in a checkpoint. Buffers are whole on every rank."""
        parts = {keys.PARAMETERS + name: self._master_part(parameter) for name, parameter in self._each()}
        ties = self._ties()
        return parts | {keys.PARAMETERS + name: Shard(buffer.shape, buffer) for name, buffer in self._buffers().items() if name not in ties}

    def _to_export(self) -> dict[str, LazyShard]:
        """The same, as an export takes it: by their names in the module."""
        return {name.removeprefix(keys.PARAMETERS): lazy_shard_of(part) for name, part in self._model_parts().items()}

    def _state_parts(self) -> dict[str, Shard]:
        """The optimizer's state, by its names in a checkpoint."""
        return {
            keys.of_optimizer(name, key): part
            for name, parameter in self._trained().items()
            for key, part in self._optimizer_parts(parameter).items()
        }

    def _trained(self) -> dict[str, nn.Parameter]:
        """The parameters that the optimizer was built for, by their first names."""
        return {name: parameter for name, parameter in self._each() if name in self._freezing.prepared}

    def _buffers(self) -> dict[str, Tensor]:
        """Those that a state dict has, under every name."""
        named = self._module.named_buffers(remove_duplicate=False)
        return {name: buffer for name, buffer in named if not self._is_passing(name)}

    def _is_passing(self, name: str) -> bool:
        module, _, own = name.rpartition(".")
        return own in self._module.get_submodule(module)._non_persistent_buffers_set

    def _ties(self) -> dict[str, str]:
        """Other names of parameters and persistent buffers, to the first."""
        first: dict[int, str] = {}
        named = {**self._named, **self._buffers()}
        return {name: first[id(tensor)] for name, tensor in named.items() if first.setdefault(id(tensor), name) != name}
