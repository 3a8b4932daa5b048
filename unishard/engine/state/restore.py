"""Brings a running engine to where a checkpoint was."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from unishard.checkpoint import keys, metadata
from unishard.checkpoint import manifest as manifests
from unishard.checkpoint.hashing import hashes, hexadecimal
from unishard.checkpoint.manifest import Manifest
from unishard.checkpoint.matching import Match, Wanted, fit
from unishard.checkpoint.tensor_reader import ReadRequest, Tensors
from unishard.checkpoint.user_state import unpack
from unishard.checkpoint.verifying import damaged
from unishard.distributed.on_ranks import on_all
from unishard.distributed.shards import Shard, shard_norms
from unishard.engine.model.dtypes import DTYPES
from unishard.engine.optim.optimizer_state import StateSpec, keys_of
from unishard.engine.state import random_state
from unishard.engine.state.snapshot import Capturing, options_of
from unishard.errors import CheckpointError
from unishard.plugins.backend import Resumed

__all__ = ["Restoring"]

_logger = logging.getLogger("unishard")


class Restoring(Capturing):
    """Reads a checkpoint into live memory. `TrainingEngine` inherits it."""

    @abstractmethod
    def _set_trainable(self, names: Sequence[str], trainable: bool) -> None:
        """Freeze parameters or let them train, between two windows."""

    @abstractmethod
    def _epoch_of(self, position: Any) -> int | None:
        """The epoch in which a loader goes on from there."""

    @abstractmethod
    def _resume_data(self, positions: list[Any], world: int) -> None:
        """Let the next training loader go on where those of so many ranks were."""

    def _restore(self, folder: Path, group: dist.ProcessGroup, *, strict: bool, verify: str | None, data: bool) -> Resumed:
        manifest = on_all(group, lambda: manifests.read(folder))
        on_all(group, lambda: _verify_files(folder, manifest, all_of_them=verify is not None))
        tensors = on_all(group, lambda: Tensors(folder))
        self._settle_state()
        chosen = on_all(group, lambda: fit(manifest, self._shapes(), self._wanted(), strict=strict))
        specs = on_all(group, lambda: dict(self._specs(chosen, tensors)))
        self._make_optimizer_state(specs)
        on_all(group, lambda: self._fill(chosen, tensors))
        self._state_loaded()
        notes = [*chosen.notes, *self._go_on(manifest, tensors, group)]
        positions = on_all(group, lambda: [unpack(position, tensors.whole) for position in manifest.data])
        positions = positions if data else []
        self._resume_data(positions, manifest.world_size)
        if verify == "bits":
            on_all(group, lambda: self._compare_bits(folder, manifest, chosen, specs))
        norms_now = self._norms(chosen, manifest, specs)
        if dist.get_rank() == 0:
            told = [f"norm of {kind} {norm:.9g}, saved {manifest.norms.get(kind, math.nan):.9g}" for kind, norm in norms_now.items()]
            _logger.info("%s: resumed at step %d: %s", folder, manifest.step, "; ".join(told))
            for note in notes:
                _logger.warning("%s: %s", folder, note)
        return Resumed(folder, manifest.step, self._epoch(positions), unpack(manifest.state, tensors.whole), tuple(notes))

    # -- tensors ----------------------------------------------------------------------------------------------------------

    def _shapes(self) -> dict[str, Sequence[int]]:
        return {name: part.shape for name, part in self._model_parts().items() if part.shape.numel()}

    def _wanted(self) -> dict[str, Wanted]:
        optimizer = self._stepping()
        wanted: dict[str, Wanted] = {}
        for names, group in zip(self._group_names, optimizer.param_groups, strict=True):
            template = keys_of(optimizer, group)
            needs = Wanted(frozenset(template.tensors), frozenset(template.numbers))
            wanted |= dict.fromkeys(names, needs)
        return wanted

    def _specs(self, chosen: Match, tensors: Tensors) -> Iterator[tuple[nn.Parameter, StateSpec]]:
        """With the numbers of the checkpoint, in the formats in which the optimizer that runs keeps its state."""
        trained, optimizer = self._trained(), self._stepping()
        options = {name: group for names, group in zip(self._group_names, optimizer.param_groups, strict=True) for name in names}
        numbers = {(name, key): torch.zeros(1) for name, needs in chosen.optimizer.items() for key in needs.numbers}
        tensors.read(ReadRequest(keys.of_optimizer(name, key), 0, value) for (name, key), value in numbers.items())
        for name, needs in chosen.optimizer.items():
            master = self._master_part(trained[name]).values
            kept = keys_of(optimizer, options[name], torch.empty(1, dtype=master.dtype, device=master.device))
            yield trained[name], StateSpec(kept.tensors, {key: numbers[name, key].item() for key in needs.numbers})

    @torch.no_grad()
    def _fill(self, chosen: Match, tensors: Tensors) -> None:
        """Read what this rank needs into its memory."""
        parts = self._model_parts()
        wanted = {name: parts[name] for name in chosen.model}
        trained = self._trained()
        for name, needs in chosen.optimizer.items():
            held = self._optimizer_parts(trained[name])
            wanted |= {keys.of_optimizer(name, key): held[key] for key in needs.tensors if key in held}
        targets, scattered = [], []
        for name, part in wanted.items():
            values = part.values.detach()
            flat = values.view(-1) if values.is_contiguous() else torch.empty(values.numel(), dtype=values.dtype, device=values.device)
            if not values.is_contiguous():
                scattered.append((values, flat))
            targets.append(ReadRequest(name, 0 if part.group is None else part.start, flat))
        tensors.read(targets)
        for values, flat in scattered:
            values.copy_(flat.view(values.shape))

    def _compare_bits(self, folder: Path, manifest: Manifest, chosen: Match, specs: Mapping[nn.Parameter, StateSpec]) -> None:
        """Hash what every rank holds now, and compare it with the manifest. Collective."""
        held = {name: part for name, part in self._held(chosen, specs).items() if manifest.tensors[name].dtype == _word(part)}
        wrong = [name for name, value in hashes(held, self._device).items() if hexadecimal(value) != manifest.tensors[name].hash]
        if wrong:
            raise CheckpointError(
                f"{folder}: {len(wrong)} of {len(held)} tensors are not what was saved, such as {wrong[0]}; do not go on from this state"
            )

    def _held(self, chosen: Match, specs: Mapping[nn.Parameter, StateSpec]) -> dict[str, Shard]:
        """What was read, in the same order on all ranks that hold parts of it; empty parts where this rank holds nothing."""
        parts = self._model_parts()
        held = {name: parts[name] for name in chosen.model}
        for name, parameter in self._trained().items():
            needs = chosen.optimizer.get(name)
            place = self._master_part(parameter)
            mine = self._optimizer_parts(parameter) if needs else {}
            for key in sorted(needs.tensors if needs else ()):
                if key in mine:
                    held[keys.of_optimizer(name, key)] = mine[key]
                elif place.group is not None:
                    held[keys.of_optimizer(name, key)] = place._replace(values=place.values[:0].to(specs[parameter].tensors[key]))
        return held

    def _norms(self, chosen: Match, manifest: Manifest, specs: Mapping[nn.Parameter, StateSpec]) -> dict[str, float]:
        """L2 norm of all parameters together, and of each kind of optimizer state of which this rank knows all. Collective."""
        held = self._held(chosen, specs)
        counted = {name: part for name, part in held.items() if part.values.dtype in DTYPES.values()}
        squares: dict[str, float] = {}
        for name, norm in shard_norms(counted, self._device).items():
            state = keys.optimizer_part(name)
            if state or keys.parameter_of(name) not in manifest.buffers:
                kind = state[1] if state else "parameters"
                squares[kind] = squares.get(kind, 0.0) + norm**2
        # Where whole tensors are divided between the ranks, each knows only its own.
        unknown = {key for name, needs in chosen.optimizer.items() for key in needs.tensors if keys.of_optimizer(name, key) not in held}
        return {kind: math.sqrt(square) for kind, square in squares.items() if kind not in unknown}

    # -- everything else --------------------------------------------------------------------------------------------------

    def _go_on(self, manifest: Manifest, tensors: Tensors, group: dist.ProcessGroup) -> Iterator[str]:
        """Continue whatever is no tensor of the model or the optimizer; says what could not be continued as it was. Collective."""
        self._updates = manifest.step
        yield from self._casts(manifest)
        yield from self._global_batch(manifest)
        if self._trained():
            yield from self._go_on_optimizing(manifest)
            yield from on_all(group, lambda: self._go_on_drawing(manifest, tensors))

    def _global_batch(self, manifest: Manifest) -> Iterator[str]:
        training = (manifest.config or {}).get("training", {})
        fields = ("micro_batch_size", "gradient_accumulation_steps")
        if not all(isinstance(training.get(field), int) for field in fields):
            return
        then = math.prod(training[field] for field in fields) * manifest.world_size
        now = math.prod(getattr(self._cfg.training, field) for field in fields) * dist.get_world_size()
        if self._trained() and then != now:
            what = f"an update was made of {then} samples and is made of {now} now"
            yield f"{what}; change training.gradient_accumulation_steps with the ranks"

    def _casts(self, manifest: Manifest) -> Iterator[str]:
        parts = self._model_parts()
        cast = [name for name, part in parts.items() if name in manifest.tensors and manifest.tensors[name].dtype != _word(part)]
        if cast:
            yield (
                f"{len(cast)} tensors of the model were {manifest.tensors[cast[0]].dtype} and are {_word(parts[cast[0]])} now, such as "
                f"{keys.parameter_of(cast[0])}"
            )

    def _go_on_optimizing(self, manifest: Manifest) -> Iterator[str]:
        paused = [name for name in manifest.frozen if name in self._freezing.prepared]
        if manifest.optimizer is not None:
            trained = {name for each in manifest.optimizer.groups for name in each.names}
            self._pause([name for name in paused if name in trained])
        if manifest.loss_scale is not None:
            self._loss_scale.go_on(manifest.loss_scale)
        if manifest.optimizer is None or manifest.schedule is None:
            return
        was, runs = manifest.optimizer.class_name, type(self._stepping()).__name__
        if was != runs and hasattr(torch.optim, was) and hasattr(torch.optim, runs):  # others are the same, in one kernel or on the CPU
            yield f"the optimizer was {was} and is {runs} now, which counts"
        then, now = manifest.optimizer.groups, self._optimizer.param_groups
        if [sorted(each.names) for each in then] != [sorted(names) for names in self._group_names]:
            yield "the parameter groups are others than they were; the learning rates are those of the config"
            self._schedule.go_on(manifest.schedule, [])
            return
        self._schedule.go_on(manifest.schedule, [each.options for each in then])
        facts = self._schedule.facts()
        continues = manifest.schedule.torch is not None and manifest.schedule.torch["class_name"] == facts.get("torch", {}).get(
            "class_name"
        )
        for index, (before, after) in enumerate(zip(then, now, strict=True)):
            options = options_of(after)
            if continues and before.options.get("initial_lr") != options.get("initial_lr"):
                yield (
                    f"group {index} of the optimizer: initial_lr was {before.options.get('initial_lr')} and is {options.get('initial_lr')} "
                    "now; the scheduler goes on with what it was"
                )
            for key in sorted((before.options.keys() & options.keys()) - _BY_SCHEDULE):
                if before.options[key] != options[key]:
                    yield f"group {index} of the optimizer: {key} was {before.options[key]} and is {options[key]} now, which counts"
        peaks = facts.get("peaks", [])
        for index, (before_, after_) in enumerate(zip(manifest.schedule.peaks, peaks, strict=False)):
            if before_ != after_:
                yield f"group {index} of the optimizer: lr was {before_} at its peak and is {after_} now, which counts"

    def _pause(self, frozen: Sequence[str]) -> None:
        """Freeze those parameters, and let the others train, as `set_trainable` had it. Collective."""
        trained = self._trained()
        freeze = [name for name, parameter in trained.items() if name in frozen and parameter.requires_grad]
        thaw = [name for name, parameter in trained.items() if name not in frozen and not parameter.requires_grad]
        if freeze:
            self._set_trainable(freeze, False)
        if thaw:
            self._set_trainable(thaw, True)

    def _go_on_drawing(self, manifest: Manifest, tensors: Tensors) -> list[str]:
        rank = dist.get_rank()
        prefix = f"{keys.RANDOM}rank{rank:05d}."
        saved = {name.removeprefix(prefix): tensors.whole(name) for name in tensors if name.startswith(prefix)}
        if saved and manifest.world_size == dist.get_world_size():
            random_state.restore(saved, self._device)
            return []
        random_state.reseed(self._cfg.training.seed, manifest.step, rank)
        why = f"saved by {manifest.world_size} ranks" if manifest.world_size != dist.get_world_size() else "no random numbers were saved"
        return [f"{why}, so random numbers such as dropout's are drawn anew from training.seed, step and rank"]

    def _epoch(self, positions: Sequence[Any]) -> int:
        epoch = next((self._epoch_of(position) for position in positions if position is not None), None)
        return epoch or 0


_BY_SCHEDULE = {"lr", "initial_lr"}


def _word(part: Shard) -> str:
    return str(part.values.dtype).removeprefix("torch.")


def _verify_files(folder: Path, manifest: Manifest, *, all_of_them: bool) -> None:
    """This rank's share of the files, or the small index alone, which decides where everything goes."""
    names = sorted(manifest.files) if all_of_them else [metadata.FILE]
    names = names[dist.get_rank() :: dist.get_world_size()]
    problems = damaged(folder, manifest, names)
    if problems:
        raise CheckpointError(f"{folder}: {'; '.join(problems)}; load another checkpoint (unishard checkpoint list {folder.parent})")
