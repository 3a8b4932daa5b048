"""Take a snapshot of everything that a run needs to resume, without copying or moving tensors."""

from __future__ import annotations

import hashlib
import json
import platform
import random
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unishard.checkpoint import manifest
from unishard.checkpoint.export.pretrained import stored_assets
from unishard.checkpoint.hashing import hash_of
from unishard.checkpoint.manifest import ModelRecord, fingerprint_of
from unishard.checkpoint.saving import Snapshot
from unishard.checkpoint.user_state import by_rank, pack
from unishard.contract.checkpoint_format import GroupRecord, OptimizerFacts
from unishard.data.sampler import seed_of
from unishard.distributed.nested_tensors import obstacle
from unishard.distributed.on_ranks import on_all, ranks_of
from unishard.distributed.shards import Shard, lazy_shard_of
from unishard.engine.loop.accumulation import Accumulation
from unishard.engine.loop.buffers import Merged
from unishard.engine.state.extra_state import extra_state_of
from unishard.engine.state.run import Run
from unishard.errors import CheckpointError
from unishard.version import __version__

# -- The states of the random number generators that training uses ---------------------------------


def capture_random(device: torch.device) -> dict[str, Tensor]:
    """Read the states of this rank's generators: torch's on the CPU and on its CUDA device, Python's, and numpy's
    global one.

    numpy is included only if it is already imported; otherwise nothing can have used it.

    Args:
        device: Where this rank computes.

    Returns:
        Bytes by kind (`torch`, `cuda`, `python`, `numpy`): torch's own encoding, else JSON.
    """
    states = {"torch": torch.get_rng_state(), "python": _packed(random.getstate())}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    if "numpy" in sys.modules:
        states["numpy"] = _packed(_numpy_state())
    return states


def restore_random(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore the states that `capture` returned. A generator without a captured state does not change.

    Args:
        states: The result of `capture`, on any device.
        device: Where this rank computes; without CUDA, a CUDA state is ignored.

    Raises:
        CheckpointError: A state does not fit its generator. Those before it are restored.
    """
    setters: dict[str, Callable[[Tensor], None]] = {
        "torch": torch.set_rng_state,
        "python": _set_python,
        "numpy": _set_numpy,
    }
    if device.type == "cuda":
        setters["cuda"] = lambda state: torch.cuda.set_rng_state(state, device)
    for kind in setters.keys() & states.keys():
        try:
            setters[kind](states[kind].cpu())
        except (RuntimeError, TypeError, ValueError, KeyError) as problem:
            raise CheckpointError(
                f"the checkpoint's {kind} random state does not fit this version of {kind} ({problem}); resume with "
                "the versions in its manifest"
            ) from problem


def require_random(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Check that `restore` can restore the states. The generators do not change.

    Raises:
        CheckpointError: A state does not fit its generator.
    """
    now = capture_random(device)
    try:
        restore_random(states, device)
    finally:
        restore_random(now, device)


def reseed(seed: int, step: int, rank: int) -> None:
    """Seed all generators of this rank from three numbers, for a run that resumes with another number of ranks.

    The saved states of the ranks cannot be used then. The new seeds differ between ranks and steps and are
    reproducible: resuming the same checkpoint again on the same number of ranks draws the same numbers.

    Args:
        seed: `training.seed`.
        step: The number of updates made.
        rank: This rank.
    """
    new = seed_of(seed, step, rank)
    torch.manual_seed(new)  # CUDA's too
    random.seed(new)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(new % 2**32)


def _numpy_state() -> dict[str, Any]:
    state = sys.modules["numpy"].random.get_state(legacy=False)
    return {**state, "state": {**state["state"], "key": state["state"]["key"].tolist()}}


def _set_numpy(state: Tensor) -> None:
    import numpy  # slow to import, and needed only if it was used before

    numpy.random.set_state(_unpacked(state))


def _set_python(state: Tensor) -> None:
    version, internal, gauss = _unpacked(state)
    random.setstate((version, tuple(internal), gauss))


def _packed(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _unpacked(state: Tensor) -> Any:
    return json.loads(bytes(state.tolist()))


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
    extra, extra_tensors = on_all(group, lambda: pack(extra_state_of(run.adapter.module), manifest.EXTRA_STATE))
    data, data_tensors = on_all(group, lambda: pack(run.batching.position(), f"data.rank{rank:05d}."))
    random = capture_random(run.adapter.device)
    own = {f"{manifest.RANDOM}rank{rank:05d}.{kind}": value for kind, value in random.items()} | data_tensors
    own |= {f"{manifest.BUFFERS}rank{rank:05d}.{name}": buffer for name, buffer in merged.own.items()}
    own |= user_tensors
    model, buffers = tensors.model_shards(merged.values), [*tensors.buffers()]
    assets = on_all(group, lambda: {} if rank else stored_assets(run.adapter.module, tensors.to_export()))
    if rank:  # only rank 0's buffers and extra state are saved
        model = {name: shard for name, shard in model.items() if manifest.parameter_of(name) not in buffers}
    else:
        own |= extra_tensors
        own |= {f"{manifest.BUFFERS}base.{name}": buffer for name, buffer in merged.bases.items()}
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
    packed, tensors = pack(state, f"{manifest.STATE}rank{rank:05d}.")
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
