"""Takes down everything that a run needs to go on, without copying or moving any tensor."""

from __future__ import annotations

import platform
from abc import abstractmethod
from importlib.metadata import version
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from unishard.checkpoint import keys
from unishard.checkpoint.lazy_shards import lazy_shard_of
from unishard.checkpoint.manifest import GroupRecord, ModelRecord, OptimizerFacts, fingerprint_of
from unishard.checkpoint.saving import Snapshot
from unishard.checkpoint.user_state import pack
from unishard.config import Config
from unishard.distributed.on_ranks import on_all
from unishard.distributed.shards import Shard
from unishard.engine.optim.loss_scale import LossScale
from unishard.engine.optim.schedule import Schedule
from unishard.engine.optim.schedulers import TorchSchedule
from unishard.engine.state import random_state
from unishard.engine.state.tensors import TrainingState
from unishard.export.models import assets_of
from unishard.plugins import registry
from unishard.version import __version__

__all__ = ["Capturing", "options_of"]


class Capturing(TrainingState):
    """Makes the snapshot that a checkpoint is written from. `TrainingEngine` inherits it."""

    _cfg: Config
    _updates: int
    _schedule: Schedule | TorchSchedule
    _loss_scale: LossScale
    _group_names: list[list[str]]
    _optimizer: Any
    _model_class: str

    @abstractmethod
    def _stepping(self) -> Optimizer:
        """The torch optimizer that makes the updates, whatever is around it."""

    @abstractmethod
    def _data_position(self) -> Any:
        """Where this rank's loader is, for another run to go on there; None where it cannot say."""

    def _snapshot(self, state: Any, group: dist.ProcessGroup) -> Snapshot:
        """This moment. Collective.

        Raises:
            CheckpointError: On every rank: `state` or a loader's position holds what cannot be saved.
        """
        rank = dist.get_rank()
        user, user_tensors = on_all(group, lambda: pack(state))
        data, data_tensors = on_all(group, lambda: pack(self._data_position(), f"data.rank{rank:05d}."))
        random = random_state.capture(self._device)
        own = {f"{keys.RANDOM}rank{rank:05d}.{kind}": value for kind, value in random.items()} | data_tensors
        model, buffers = self._model_parts(), [*self._buffers()]
        assets = on_all(group, lambda: {} if rank else assets_of(self._module, self._to_export()).to_files())
        if rank:  # rank 0's buffers count, and its state
            model = {name: part for name, part in model.items() if keys.parameter_of(name) not in buffers}
        else:
            own |= user_tensors
        state_of_optimizer = on_all(group, self._state_parts)
        parts = model | state_of_optimizer | {name: Shard(value.shape, value) for name, value in own.items()}
        return Snapshot(
            step=self._updates,
            stretches={name: lazy_shard_of(part) for name, part in parts.items() if part.shape.numel()},
            ties=self._ties(),
            facts=on_all(group, self._facts) | {"data": _gathered(data, group), "state": user},
            assets=assets,
        )

    def _facts(self) -> dict[str, Any]:
        trained, ties = self._trained(), self._ties()
        shapes = {name.removeprefix(keys.PARAMETERS): list(part.shape) for name, part in self._model_parts().items()}
        backend = registry.get(self._cfg.backend)
        packages = dict.fromkeys(["torch", *backend.requires])
        return {
            "versions": {"python": platform.python_version(), "unishard": __version__}
            | {name: version(name).partition("+")[0] for name in packages},
            "world_size": dist.get_world_size(),
            "config": self._cfg.model_dump(mode="json"),
            "model": ModelRecord(
                class_name=self._model_class,
                fingerprint=fingerprint_of(shapes),
                numel=sum(self._master_part(parameter).shape.numel() for _, parameter in self._each()),
            ),
            "frozen": [name for name, parameter in self._each() if not parameter.requires_grad],
            "buffers": [name for name in self._buffers() if name not in ties],
            "optimizer": self._optimizer_facts() if trained else None,
            "schedule": self._schedule.facts() if trained else None,
            "loss_scale": self._loss_scale.facts() if trained else None,
        }

    def _optimizer_facts(self) -> OptimizerFacts:
        groups = zip(self._group_names, self._optimizer.param_groups, strict=True)
        return OptimizerFacts(
            class_name=type(self._stepping()).__name__,
            groups=[GroupRecord(names=names, options=options_of(group)) for names, group in groups],
        )


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a parameter group, as far as JSON has them."""
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    options = {key: value.item() if isinstance(value, Tensor) and not value.dim() else value for key, value in options.items()}
    options = {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}
    return {key: value for key, value in options.items() if value is None or isinstance(value, bool | int | float | str | list)}


def _gathered(position: Any, group: dist.ProcessGroup) -> list[Any]:
    """What every rank has, on rank 0. Collective."""
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(position, everyone, group=group, group_dst=0)
    return everyone or []
