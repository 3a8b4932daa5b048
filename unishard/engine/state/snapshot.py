"""Take a snapshot of everything that a run needs to resume, without copying or moving tensors."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch.distributed as dist
from torch import Tensor

from unishard.checkpoint import tensor_names
from unishard.checkpoint.export.models import stored_assets
from unishard.checkpoint.hashing import hash_of
from unishard.checkpoint.manifest import ModelRecord, fingerprint_of
from unishard.checkpoint.saving import Snapshot
from unishard.checkpoint.user_state import by_rank, pack
from unishard.contract.training_facts import GroupRecord, OptimizerFacts
from unishard.distributed.lazy_shards import lazy_shard_of
from unishard.distributed.on_ranks import on_all, ranks_of
from unishard.distributed.shards import Shard
from unishard.distributed.storable import obstacle
from unishard.engine.loop.accumulation import Accumulation
from unishard.engine.loop.buffers import Merged
from unishard.engine.state.extra_state import extra_state_of
from unishard.engine.state.matrix_state import matrix_state_of
from unishard.engine.state.random_state import capture_random
from unishard.engine.state.run import Run
from unishard.errors import CheckpointError
from unishard.version import __version__


def take_snapshot(run: Run, state: Any, merged: Merged, group: dist.ProcessGroup) -> Snapshot:
    """Take a snapshot of a run. Collective.

    Args:
        run: The run.
        state: The user's own state.
        merged: The buffers of all ranks together.
        group: All ranks, on the host.

    Raises:
        CheckpointError: On every rank: `state`, the optimizer or a loader's position contains something that cannot be
            saved.
    """
    rank, tensors = dist.get_rank(), run.tensors
    user, user_tensors = _packed_state(state, group)
    extra, extra_tensors = on_all(group, lambda: pack(extra_state_of(run.adapter.module), tensor_names.EXTRA_STATE))
    data, data_tensors = on_all(group, lambda: pack(run.batching.position(), f"data.rank{rank:05d}."))
    random = capture_random(run.adapter.device)
    own = {f"{tensor_names.RANDOM}rank{rank:05d}.{kind}": value for kind, value in random.items()} | data_tensors
    own |= {f"{tensor_names.BUFFERS}rank{rank:05d}.{name}": buffer for name, buffer in merged.own.items()}
    own |= user_tensors
    own |= on_all(group, lambda: matrix_state_of(run.torch_optimizer))
    model, buffers = tensors.model_shards(merged.values), [*tensors.buffers()]
    assets = on_all(group, lambda: {} if rank else stored_assets(run.adapter.module, tensors.to_export()))
    if rank:  # only rank 0's buffers and extra state are saved
        model = {name: shard for name, shard in model.items() if tensor_names.parameter_of(name) not in buffers}
    else:
        own |= extra_tensors
        own |= {f"{tensor_names.BUFFERS}base.{name}": buffer for name, buffer in merged.bases.items()}
    state_of_optimizer = on_all(group, lambda: _storable(tensors.optimizer_shards()))
    shards = (
        model
        | state_of_optimizer
        | tensors.average_shards()
        | {name: Shard(value.shape, value) for name, value in own.items()}
    )
    return Snapshot(
        step=run.order.updates,
        shards={name: lazy_shard_of(shard) for name, shard in shards.items() if shard.shape.numel()}
        | tensors.lazy_moments(),
        ties=tensors.ties(),
        facts=on_all(group, lambda: _facts(run))
        | {"data": _gathered(data, group), "state": user, "extra_state": extra},
        assets=assets,
    )


def _packed_state(state: Any, group: dist.ProcessGroup) -> tuple[Any, dict[str, Tensor]]:
    """The user's state, and what this rank writes of it: rank 0's, unless ranks pass different ones. Collective."""
    rank = dist.get_rank()
    packed, tensors = on_all(group, lambda: pack(state))
    digests = ranks_of(group).gather(None if state is None else _digest(packed, tensors))
    first, *_ = digests
    if all(digest == first or (digest is None and first) for digest in digests):
        return packed, {} if rank else tensors
    packed, tensors = pack(state, f"{tensor_names.STATE}rank{rank:05d}.")
    return by_rank(_gathered(packed, group)), tensors


def _digest(packed: Any, tensors: Mapping[str, Tensor]) -> str:
    content = [packed, {name: hash_of(tensor) for name, tensor in tensors.items()}]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


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
        name.removeprefix(tensor_names.PARAMETERS): list(shard.shape) for name, shard in tensors.model_shards().items()
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
        "passes": run.batching.training.passes(),
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
