"""Take a snapshot of everything that a run needs to resume, without copying or moving tensors."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Any

import torch.distributed as dist
from torch import Tensor

from unishard.checkpoint import manifest
from unishard.checkpoint.export.models import assets_of
from unishard.checkpoint.manifest import ModelRecord, fingerprint_of
from unishard.checkpoint.saving import Snapshot
from unishard.checkpoint.user_state import pack
from unishard.contract.training_facts import GroupRecord, OptimizerFacts
from unishard.distributed.on_ranks import on_all
from unishard.distributed.shards import Shard, lazy_shard_of
from unishard.distributed.storable import obstacle
from unishard.engine.loop.accumulation import Accumulation
from unishard.engine.state import random_state
from unishard.engine.state.run import Run
from unishard.errors import CheckpointError
from unishard.version import __version__


def take_snapshot(run: Run, state: Any, group: dist.ProcessGroup) -> Snapshot:
    """Take a snapshot of a run. Collective.

    Raises:
        CheckpointError: On every rank: `state`, the optimizer or a loader's position contains something that cannot be
            saved.
    """
    rank, tensors = dist.get_rank(), run.tensors
    user, user_tensors = on_all(group, lambda: pack(state))
    data, data_tensors = on_all(group, lambda: pack(run.batching.position(), f"data.rank{rank:05d}."))
    random = random_state.capture(run.adapter.device)
    own = {f"{manifest.RANDOM}rank{rank:05d}.{kind}": value for kind, value in random.items()} | data_tensors
    model, buffers = tensors.model_shards(), [*tensors.buffers()]
    assets = on_all(group, lambda: {} if rank else assets_of(run.adapter.module, tensors.to_export()).to_files())
    if rank:  # only rank 0's buffers and user state are saved
        model = {name: shard for name, shard in model.items() if manifest.parameter_of(name) not in buffers}
    else:
        own |= user_tensors
    state_of_optimizer = on_all(group, lambda: _storable(tensors.optimizer_shards()))
    shards = (
        model
        | state_of_optimizer
        | tensors.average_shards()
        | {name: Shard(value.shape, value) for name, value in own.items()}
    )
    return Snapshot(
        step=run.order.updates,
        shards={name: lazy_shard_of(shard) for name, shard in shards.items() if shard.shape.numel()},
        ties=tensors.ties(),
        facts=on_all(group, lambda: _facts(run)) | {"data": _gathered(data, group), "state": user},
        assets=assets,
    )


def _storable(shards: dict[str, Shard]) -> dict[str, Shard]:
    """The shards, none of which is of a kind that cannot be saved; those of the model were checked by `prepare`."""
    for name, shard in shards.items():
        problem = obstacle(shard.values)
        if problem is not None:
            raise CheckpointError(f"{name} {problem}, which cannot be saved; choose another dtype or another optimizer")
    return shards


def _facts(run: Run) -> dict[str, Any]:
    tensors, accumulation = run.tensors, run.accumulation
    if accumulation is not None:
        accumulation.resolve_pending()
    ties = tensors.ties()
    shapes = {
        name.removeprefix(manifest.PARAMETERS): list(shard.shape) for name, shard in tensors.model_shards().items()
    }
    return {
        "versions": {"python": platform.python_version(), "unishard": __version__}
        | {name: version(name).partition("+")[0] for name in run.packages},
        "world_size": dist.get_world_size(),
        "config": run.text,
        "model": ModelRecord(
            class_name=run.model_class,
            fingerprint=fingerprint_of(shapes),
            numel=sum(run.adapter.master_shard(parameter).shape.numel() for _, parameter in tensors.each()),
        ),
        "frozen": [name for name, parameter in tensors.each() if not parameter.requires_grad],
        "buffers": [name for name in tensors.buffers() if name not in ties],
        "optimizer": None if accumulation is None else _optimizer_facts(run, accumulation),
        "schedule": None if accumulation is None else accumulation.schedule.facts(),
        "loss_scale": None if accumulation is None else accumulation.loss_scale.facts(),
    }


def _optimizer_facts(run: Run, accumulation: Accumulation) -> OptimizerFacts:
    return OptimizerFacts(
        class_name=type(accumulation.adapter.torch_optimizer).__name__,
        groups=[
            GroupRecord(names=list(names), options=options_of(group))
            for names, group in zip(run.group_names, run.param_groups, strict=True)
        ],
    )


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a parameter group that JSON can represent."""
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    options = {
        key: value.item() if isinstance(value, Tensor) and not value.dim() else value for key, value in options.items()
    }
    options = {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}
    return {
        key: value
        for key, value in options.items()
        if value is None or isinstance(value, bool | int | float | str | list)
    }


def _gathered(position: Any, group: dist.ProcessGroup) -> list[Any]:
    """Gather an object of every rank on rank 0. Collective."""
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(position, everyone, group=group, group_dst=0)
    return everyone or []
