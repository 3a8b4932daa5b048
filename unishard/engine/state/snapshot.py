"""Take a snapshot of everything that a run needs to resume, without copying or moving tensors."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Any

import torch.distributed as dist

from unishard.checkpoint import tensor_names
from unishard.checkpoint.export.models import stored_assets
from unishard.checkpoint.manifest import ModelRecord, fingerprint_of
from unishard.checkpoint.saving import Snapshot
from unishard.distributed.on_ranks import on_all
from unishard.engine.loop.buffers import Merged
from unishard.engine.state.parts.of_run import parts_of
from unishard.engine.state.run import Run
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
    saved = [part.saved(group) for part in parts_of(run, state, merged).all]
    assets = on_all(
        group, lambda: {} if dist.get_rank() else stored_assets(run.adapter.module, run.tensors.to_export())
    )
    return Snapshot(
        step=run.order.place.updates,
        shards={name: shard for each in saved for name, shard in each.shards.items()},
        ties=run.tensors.ties(),
        facts=_facts(run) | {name: fact for each in saved for name, fact in each.facts.items()},
        assets=assets,
    )


def _facts(run: Run) -> dict[str, Any]:
    """What the manifest says of the run itself."""
    model = run.tensors.model_shards()
    shapes = {name.removeprefix(tensor_names.PARAMETERS): list(shard.shape) for name, shard in model.items()}
    return {
        "versions": {"python": platform.python_version(), "unishard": __version__}
        | {name: version(name).partition("+")[0] for name in run.packages},
        "world_size": dist.get_world_size(),
        "config": run.text,
        "model": ModelRecord(
            class_name=run.model_class,
            fingerprint=fingerprint_of(shapes),
            numel=sum(run.adapter.master_shard(parameter).shape.numel() for _, parameter in run.tensors.each()),
        ),
    }
