"""Resume state other than tensors: schedule, loss scale, frozen parameters, random state; and list differences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unishard.checkpoint.manifest import Manifest
from unishard.checkpoint.tensor_names import BUFFERS, RANDOM, parameter_of
from unishard.checkpoint.tensor_reader import Tensors
from unishard.checkpoint.user_state import ranks_in
from unishard.config.describe import count_of
from unishard.contract.training_facts import GroupRecord, PassFacts
from unishard.data import position
from unishard.data.position import Position
from unishard.distributed.dtypes import name_of
from unishard.distributed.on_ranks import on_all
from unishard.eight_bit.adamw import AdamW8bit
from unishard.engine.loop.accumulation import Accumulation
from unishard.engine.state import random_state
from unishard.engine.state.run import Run
from unishard.engine.state.snapshot import options_of

_BY_SCHEDULE = {"lr", "initial_lr"}


def random_states(run: Run, manifest: Manifest, tensors: Tensors) -> dict[str, Tensor]:
    """The states of this rank's random generators in a checkpoint; none where another number of ranks or a run of
    inference saved it.

    Raises:
        CheckpointError: One cannot be read, or does not fit its generator.
    """
    if run.accumulation is None or manifest.world_size != dist.get_world_size():
        return {}
    states = _full(tensors, f"{RANDOM}rank{dist.get_rank():05d}.")
    random_state.require_random(states, run.adapter.device)
    return states


def buffers_of_ranks(run: Run, manifest: Manifest, tensors: Tensors) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """This rank's own buffers in a checkpoint, and those from which it counts; none as in `random_states`.

    Raises:
        CheckpointError: One cannot be read.
    """
    if run.accumulation is None or manifest.world_size != dist.get_world_size():
        return {}, {}
    return _full(tensors, f"{BUFFERS}rank{dist.get_rank():05d}."), _full(tensors, f"{BUFFERS}base.")


def _full(tensors: Tensors, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensors.full(name) for name in tensors if name.startswith(prefix)}


def own_state(manifest: Manifest) -> tuple[Any, list[str]]:
    """The user's state of this rank, packed, and notes."""
    states = ranks_in(manifest.state)
    if not states:
        return manifest.state, []
    if len(states) == dist.get_world_size():
        return states[dist.get_rank()], []
    return states[0], [
        f"{count_of(len(states), 'rank')} saved a different `state` each; every rank gets that of rank 0"
    ]


def epoch_of(manifest: Manifest, positions: Sequence[Position | None]) -> int | None:
    """The epoch of the training data; None if unknown."""
    if not manifest.step:
        return 0
    known = next((position.epoch_of(each) for each in positions if each is not None), None)
    return manifest.passes.epoch if known is None and manifest.passes is not None else known


def notes_of_data(manifest: Manifest, positions: Sequence[Position | None], epoch: int | None) -> Iterator[str]:
    """What cannot be resumed of the training data, as far as `engine.batches` has read them."""
    saved = [each["loader"] for each in positions if each is not None]
    read = PassFacts(loader=saved[0]) if saved and manifest.passes is None else manifest.passes
    if read is None:
        return
    loader = read.loader
    if read.batches and not saved:
        yield (
            f"{read.batches} batches of an epoch had been read, and no position in the data was saved, since {loader} "
            "has none: it starts from its beginning; train with unishard.dataloader(dataset, cfg), or another loader "
            "with a state_dict"
        )
    if epoch is None:
        yield (
            f"the epoch of the {loader} is unknown, so `epoch` is None; count epochs in the loop, and save the number: "
            "engine.save(state={'epoch': epoch})"
        )


def resume(run: Run, manifest: Manifest, states: Mapping[str, Tensor], group: dist.ProcessGroup) -> Iterator[str]:
    """Resume everything except the tensors of the model and the optimizer. Collective.

    Args:
        run: The run.
        manifest: Of the checkpoint.
        states: From `random_states`.
        group: All ranks, on the host.

    Yields:
        Notes about what differs from the checkpoint.
    """
    run.order.updates = manifest.step
    yield from _casts(run, manifest)
    if run.accumulation is None:
        return
    yield from _global_batch(run, manifest)
    yield from _changed_fields(run, manifest)
    yield from _resume_optimizer(run, run.accumulation, manifest)
    yield from on_all(group, lambda: _resume_random_numbers(run, manifest, states))


def _casts(run: Run, manifest: Manifest) -> Iterator[str]:
    dtypes = {
        name: name_of(shard.values.dtype)
        for name, shard in run.tensors.model_shards().items()
        if name in manifest.tensors
    }
    cast = [name for name, dtype in dtypes.items() if manifest.tensors[name].dtype != dtype]
    if cast:
        first, *_ = cast
        yield (
            f"{len(cast)} tensors of the model were {manifest.tensors[first].dtype} and are {dtypes[first]} now, such "
            f"as {parameter_of(first)}"
        )


def _global_batch(run: Run, manifest: Manifest) -> Iterator[str]:
    training = (manifest.config or {}).get("training", {})
    fields = ("micro_batch_size", "gradient_accumulation_steps")
    if not isinstance(training, Mapping) or not all(isinstance(training.get(field), int) for field in fields):
        return
    world = dist.get_world_size()
    shares_then = manifest.world_size // sharing_of(manifest.config, manifest.world_size)
    then = math.prod(training[field] for field in fields) * shares_then
    now = math.prod(getattr(run.training, field) for field in fields) * (world // sharing_of(run.text, world))
    if then != now:
        message = f"the global batch size was {then} and is now {now}"
        yield f"{message}; adjust training.gradient_accumulation_steps to the number of ranks"


def _changed_fields(run: Run, manifest: Manifest) -> Iterator[str]:
    """Fields of the loop and its schedule, but for the one that follows from others."""
    for section in ("training", "scheduler"):
        saved = (manifest.config or {}).get(section)
        then = saved if isinstance(saved, Mapping) else {}
        for field, now in run.text[section].items():
            if field != "global_batch_size" and then.get(field, now) != now:
                yield f"{section}.{field} was {then[field]}; using {now} of the config"


def _resume_optimizer(run: Run, accumulation: Accumulation, manifest: Manifest) -> Iterator[str]:
    if manifest.optimizer is not None:
        trained = {name for each in manifest.optimizer.groups for name in each.names}
        _freeze_as_saved(run, accumulation, [name for name in manifest.frozen if name in trained])
    if manifest.loss_scale is not None:
        accumulation.loss_scale.resume(manifest.loss_scale)
    if manifest.optimizer is None or manifest.schedule is None:
        return
    was, runs = manifest.optimizer.class_name, type(accumulation.adapter.torch_optimizer).__name__
    ours = (AdamW8bit.__name__, *vars(torch.optim))
    if was != runs and was in ours and runs in ours:  # other classes are fused or CPU variants of these
        yield f"the optimizer was {was}; using {runs} of the config"
    then, schedule = manifest.optimizer.groups, accumulation.schedule
    if [sorted(each.names) for each in then] != [sorted(names) for names in run.group_names]:
        yield "the parameter groups differ from the saved ones; using the learning rates of the config"
        schedule.resume(manifest.schedule, [])
        return
    schedule.resume(manifest.schedule, [each.options for each in then])
    facts = schedule.facts()
    saved = manifest.schedule.torch
    same_scheduler = saved is not None and saved.class_name == facts.get("torch", {}).get("class_name")
    yield from _changed_options(then, run.param_groups, same_scheduler=same_scheduler)
    for index, (before, after) in enumerate(zip(manifest.schedule.peaks, facts.get("peaks", []), strict=False)):
        if before != after:
            yield f"group {index} of the optimizer: peak lr was {before}; using {after} of the config"


def _changed_options(
    then: Sequence[GroupRecord], now: Sequence[Mapping[str, Any]], *, same_scheduler: bool
) -> Iterator[str]:
    for index, (before, after) in enumerate(zip(then, now, strict=True)):
        options = options_of(dict(after))
        if same_scheduler and before.options.get("initial_lr") != options.get("initial_lr"):
            yield (
                f"group {index} of the optimizer: initial_lr is {options.get('initial_lr')} in the config; the "
                f"scheduler continues with the saved {before.options.get('initial_lr')}"
            )
        for key in sorted((before.options.keys() & options.keys()) - _BY_SCHEDULE):
            if before.options[key] != options[key]:
                yield (
                    f"group {index} of the optimizer: {key} was {before.options[key]}; using {options[key]} of the "
                    "config"
                )


def _freeze_as_saved(run: Run, accumulation: Accumulation, frozen: Sequence[str]) -> None:
    """Freeze and unfreeze parameters as `set_trainable` had done in the saved run. Collective."""
    trained = run.tensors.trained()
    freeze = [name for name, parameter in trained.items() if name in frozen and parameter.requires_grad]
    thaw = [name for name, parameter in trained.items() if name not in frozen and not parameter.requires_grad]
    if freeze:
        accumulation.adapter.set_trainable(freeze, False)
    if thaw:
        accumulation.adapter.set_trainable(thaw, True)


def _resume_random_numbers(run: Run, manifest: Manifest, states: Mapping[str, Tensor]) -> list[str]:
    if states:
        random_state.restore_random(states, run.adapter.device)
        return []
    random_state.reseed(run.training.seed, manifest.step, dist.get_rank())
    saved_by = count_of(manifest.world_size, "rank")
    why = f"saved by {saved_by}" if manifest.world_size != dist.get_world_size() else "no random state was saved"
    return [f"{why}, so random generators (dropout and others) are seeded from training.seed, step and rank"]


def sharing_of(config: Mapping[str, Any] | None, world_size: int) -> int:
    """The neighboring ranks of a run that share each sample, and so have the same position in the data."""
    size = (config or {}).get("parallel", {}).get("sequence", {}).get("size", 1)
    return size if isinstance(size, int) and size > 0 and world_size % size == 0 else 1
