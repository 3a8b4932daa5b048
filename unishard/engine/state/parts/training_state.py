"""How training goes on: schedule, loss scale, frozen parameters, and what the config says otherwise now."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unishard.checkpoint.manifest import Manifest
from unishard.contract.training_facts import GroupRecord, OptimizerFacts
from unishard.distributed.on_ranks import on_all
from unishard.eight_bit.adamw import AdamW8bit
from unishard.engine.loop.accumulation import Accumulation
from unishard.engine.optim.saved_groups import match
from unishard.engine.optim.torch_schedule import alike
from unishard.engine.state.part import CheckpointSource, Part, Saved
from unishard.engine.state.parts.data_position import sharing_of
from unishard.engine.state.parts.edited import require
from unishard.engine.state.run import Run

_BY_SCHEDULE = {"lr", "initial_lr"}
_RESUMED = ("lr", "momentum", "betas")
"""The options of a parameter group that a schedule continues with."""


class TrainingState(Part):
    """What a manifest says of the optimizer and its schedule; its tensors are other parts."""

    def __init__(self, run: Run, accumulation: Accumulation) -> None:
        """Of a run that trains."""
        self._run = run
        self._accumulation = accumulation

    def saved(self, group: dist.ProcessGroup) -> Saved:
        """As in `Part`."""
        return Saved({}, on_all(group, self._facts))

    def check(self, source: CheckpointSource) -> None:
        """As in `Part`: an edited manifest may have any options, and the schedule must be able to resume."""
        manifest = source.manifest
        require(self._wrong(manifest))
        if manifest.optimizer is not None and manifest.schedule is not None:
            self._accumulation.schedule.require(manifest.schedule)

    def resume(self, source: CheckpointSource, group: dist.ProcessGroup) -> Iterator[str]:
        """As in `Part`."""
        manifest, accumulation = source.manifest, self._accumulation
        accumulation.optimizer.train_mode(self._run.adapter.module.training)  # the checkpoint may be of the other mode
        yield from self._global_batch(manifest)
        yield from self._changed_fields(manifest)
        if manifest.optimizer is not None:
            trained = {name for each in manifest.optimizer.groups for name in each.names}
            self._freeze_as_saved([name for name in manifest.frozen if name in trained])
        if manifest.loss_scale is not None:
            accumulation.loss_scale.resume(manifest.loss_scale)
        yield from self._resume_schedule(manifest)

    def _facts(self) -> dict[str, Any]:
        run, accumulation = self._run, self._accumulation
        accumulation.resolve_pending()  # the loss scale waits for the last update
        groups = [
            GroupRecord(names=list(names), options=_options_of(options))
            for names, options in zip(run.group_names, run.param_groups, strict=True)
        ]
        name = type(accumulation.updates.torch_optimizer).__name__
        return {
            "optimizer": OptimizerFacts(class_name=name, groups=groups),
            "schedule": accumulation.schedule.facts(),
            "loss_scale": accumulation.loss_scale.facts(),
        }

    def _wrong(self, manifest: Manifest) -> Iterator[str]:
        saved = manifest.optimizer.groups if manifest.optimizer else []
        for index, (then, now) in enumerate(zip(saved, self._run.param_groups, strict=False)):
            for name in _RESUMED:
                option = then.options.get(name)
                if not alike(option, now.get(name)):
                    yield f"optimizer.groups.{index}.options.{name} is {option!r:.60}"

    def _global_batch(self, manifest: Manifest) -> Iterator[str]:
        training = (manifest.config or {}).get("training", {})
        fields = ("micro_batch_size", "gradient_accumulation_steps")
        if not isinstance(training, Mapping) or not all(isinstance(training.get(field), int) for field in fields):
            return
        world = dist.get_world_size()
        shares_then = manifest.world_size // sharing_of(manifest.config, manifest.world_size)
        then = math.prod(training[field] for field in fields) * shares_then
        shares_now = world // sharing_of(self._run.text, world)
        now = math.prod(getattr(self._run.training, field) for field in fields) * shares_now
        if then != now:
            message = f"the global batch size was {then} and is now {now}"
            yield f"{message}; adjust training.gradient_accumulation_steps to the number of ranks"

    def _changed_fields(self, manifest: Manifest) -> Iterator[str]:
        """Fields of the loop and its schedule, but for the one that follows from others."""
        for section in ("training", "scheduler"):
            saved = (manifest.config or {}).get(section)
            then = saved if isinstance(saved, Mapping) else {}
            for field, now in self._run.text[section].items():
                if field != "global_batch_size" and then.get(field, now) != now:
                    yield f"{section}.{field} was {then[field]}; using {now} of the config"

    def _freeze_as_saved(self, frozen: Sequence[str]) -> None:
        """Freeze and unfreeze parameters as `set_trainable` had done in the saved run. Collective."""
        trained, updates = self._run.tensors.trained(), self._accumulation.updates
        freeze = [name for name, parameter in trained.items() if name in frozen and parameter.requires_grad]
        thaw = [name for name, parameter in trained.items() if name not in frozen and not parameter.requires_grad]
        if freeze:
            updates.set_trainable(freeze, False)
        if thaw:
            updates.set_trainable(thaw, True)

    def _resume_schedule(self, manifest: Manifest) -> Iterator[str]:
        if manifest.optimizer is None or manifest.schedule is None:
            return
        was, runs = manifest.optimizer.class_name, type(self._accumulation.updates.torch_optimizer).__name__
        ours = (AdamW8bit.__name__, *vars(torch.optim))
        if was != runs and was in ours and runs in ours:  # other classes are fused or CPU variants of these
            yield f"the optimizer was {was}; using {runs} of the config"
        schedule = self._accumulation.schedule
        groups = match(manifest.optimizer.groups, self._run.group_names)
        schedule.resume(manifest.schedule, groups)
        if groups is None:
            yield "the parameter groups differ from the saved ones; using the learning rates of the config"
            return
        facts = schedule.facts()
        saved = manifest.schedule.torch
        same_scheduler = saved is not None and saved.class_name == facts.get("torch", {}).get("class_name")
        yield from _changed_options(groups.options, self._run.param_groups, same_scheduler=same_scheduler)
        peaks = groups.of(manifest.schedule.peaks) or []
        for index, (before, after) in enumerate(zip(peaks, facts.get("peaks", []), strict=False)):
            if before != after:
                yield f"group {index} of the optimizer: peak lr was {before}; using {after} of the config"


def _changed_options(
    then: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]], *, same_scheduler: bool
) -> Iterator[str]:
    for index, (before, group) in enumerate(zip(then, now, strict=True)):
        after = _options_of(group)
        if same_scheduler and before.get("initial_lr") != after.get("initial_lr"):
            yield (
                f"group {index} of the optimizer: initial_lr is {after.get('initial_lr')} in the config; the "
                f"scheduler continues with the saved {before.get('initial_lr')}"
            )
        for key in sorted((before.keys() & after.keys()) - _BY_SCHEDULE):
            if before[key] != after[key]:
                yield f"group {index} of the optimizer: {key} was {before[key]}; using {after[key]} of the config"


def _options_of(group: Mapping[str, Any]) -> dict[str, Any]:
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
