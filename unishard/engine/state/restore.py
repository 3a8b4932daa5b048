"""Restore a checkpoint into a running engine."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from unishard.checkpoint import manifest as manifests  # a `manifest` is what was read
from unishard.checkpoint import metadata, tensor_names
from unishard.checkpoint.hashing import hash_of, hashes, hexadecimal
from unishard.checkpoint.manifest import Manifest
from unishard.checkpoint.matching import Wanted, fit
from unishard.checkpoint.tensor_reader import ReadRequest, Tensors
from unishard.checkpoint.user_state import once, unpack
from unishard.checkpoint.verifying import damaged
from unishard.contract.optimizer_state import StateSpec, keys_of
from unishard.contract.results import Resumed
from unishard.distributed.dtypes import name_of
from unishard.distributed.on_ranks import on_all
from unishard.distributed.shards import Shard, shard_norms
from unishard.engine.state.average_shards import has_average, resume_average
from unishard.engine.state.eight_bit_state import Converted
from unishard.engine.state.extra_state import restore_extra_state
from unishard.engine.state.manifest_validation import require_sense
from unishard.engine.state.matrix_state import resume_matrix_state
from unishard.engine.state.resume import (
    buffers_of_ranks,
    epoch_of,
    notes_of_data,
    own_state,
    random_states,
    resume,
    sharing_of,
)
from unishard.engine.state.run import Run
from unishard.errors import CheckpointError

_logger = logging.getLogger("unishard")


def restore(
    run: Run, folder: Path, group: dist.ProcessGroup, *, strict: bool, verify: str | None, data: bool
) -> Resumed:
    """Restore a run from a checkpoint. Collective; the arguments are those of `Engine.load`.

    Args:
        run: The run to restore.
        folder: The checkpoint.
        group: All ranks, on the host.
        strict: Whether everything must match.
        verify: What to check.
        data: Whether the next training loader continues at the checkpoint's data position.

    Raises:
        CheckpointError: On every rank.
    """
    manifest = on_all(group, lambda: manifests.read(folder))
    on_all(group, lambda: _verify_files(folder, manifest, all_of_them=verify is not None))
    tensors = on_all(group, lambda: Tensors(folder))
    read = once(tensors.full)
    positions = on_all(group, lambda: [unpack(each, read) for each in manifest.data]) if data else []
    on_all(group, lambda: require_sense(manifest, positions, run.param_groups if run.accumulation is not None else []))
    packed, notes_of_state = own_state(manifest)
    state = on_all(group, lambda: unpack(packed, read))
    extra = on_all(group, lambda: unpack(manifest.extra_state, read))
    states = on_all(group, lambda: random_states(run, manifest, tensors))
    own, bases = on_all(group, lambda: buffers_of_ranks(run, manifest, tensors))
    on_all(group, lambda: _require_schedule(run, manifest))
    run.adapter.reshard_all()
    run.order.writes += 1
    reader = on_all(group, lambda: CheckpointReader(run, folder, manifest, tensors, strict=strict))
    if run.tensors.optimizer_state is not None:
        run.tensors.optimizer_state.make(reader.specs)
    try:
        on_all(group, reader.fill)
    except CheckpointError as error:  # content that was not checked before
        raise CheckpointError(
            f"{error}; some weights are loaded already: load another checkpoint before you train on"
        ) from error
    on_all(group, lambda: resume_matrix_state(run.torch_optimizer, tensors))
    run.adapter.loaded()
    if run.accumulation is not None:  # the checkpoint may be of the other mode
        run.accumulation.optimizer.train_mode(run.adapter.module.training)
    notes = [*reader.notes, *reader.converted.notes(group), *resume(run, manifest, states, group), *notes_of_state]
    notes += on_all(group, lambda: [*restore_extra_state(run.adapter.module, extra)])
    average = run.tensors.average
    if average is not None:
        notes += on_all(group, lambda: [*resume_average(average, tensors)])
    run.tensors.saved_average = (
        tensors if run.accumulation is not None and average is None and has_average(tensors) else None
    )
    epoch = epoch_of(manifest, positions) if data else 0
    notes += [*notes_of_data(manifest, positions, epoch)] if data and run.accumulation is not None else []
    sharing = sharing_of(manifest.config, manifest.world_size)
    if data or not run.batching.training.open:
        run.batching.resume(positions[::sharing], manifest.world_size // sharing, manifest.passes if data else None)
    else:
        run.batching.training.go_on()
    if verify == "bits":
        on_all(group, reader.compare_bits)
    run.buffers.resume(own, bases)
    norms = reader.norms()
    if dist.get_rank() == 0:
        described = [
            f"norm of {kind} {norm:.9g}, saved {manifest.norms.get(kind, math.nan):.9g}" for kind, norm in norms.items()
        ]
        _logger.info("%s: resumed at step %d: %s", folder, manifest.step, "; ".join(described))
        for note in notes:
            _logger.warning("%s: %s", folder, note)
    return Resumed(folder, manifest.step, epoch, state, tuple(notes))


class CheckpointReader:
    """Reads the tensors of a checkpoint into those of a run."""

    def __init__(self, run: Run, folder: Path, manifest: Manifest, tensors: Tensors, *, strict: bool) -> None:
        """Match names, shapes and kinds of optimizer state. Changes nothing.

        Raises:
            CheckpointError: They do not match, and `strict` is set.
        """
        self._run = run
        self._folder = folder
        self._manifest = manifest
        self._tensors = tensors
        shapes = {name: shard.shape for name, shard in run.tensors.model_shards().items() if shard.shape.numel()}
        self._match = fit(manifest, shapes, self._wanted(), strict=strict)
        self.notes = self._match.notes
        """What did not match."""
        self.converted = Converted(0, 0)
        """What became of moments of 8 bits, once they are read."""
        self.specs: Mapping[nn.Parameter, StateSpec] = dict(self._specs())
        """The optimizer state to create before it is read."""
        self._require()

    def _wanted(self) -> dict[str, Wanted]:
        wanted: dict[str, Wanted] = {}
        if self._run.accumulation is None:
            return wanted
        optimizer = self._run.accumulation.adapter.torch_optimizer
        for names, group in zip(self._run.group_names, optimizer.param_groups, strict=True):
            template = keys_of(optimizer, group)
            needs = Wanted(frozenset(template.tensors), frozenset(template.numbers))
            wanted |= dict.fromkeys(names, needs)
        return wanted

    def _specs(self) -> Iterator[tuple[nn.Parameter, StateSpec]]:
        """Optimizer state with the numbers of the checkpoint and the dtypes of the current optimizer."""
        if self._run.accumulation is None:
            return
        trained, optimizer = self._run.tensors.trained(), self._run.accumulation.adapter.torch_optimizer
        groups = zip(self._run.group_names, optimizer.param_groups, strict=True)
        options = {name: group for names, group in groups for name in names}
        numbers = {
            (name, key): torch.zeros(1) for name, needs in self._match.optimizer.items() for key in needs.numbers
        }
        self._tensors.read(
            ReadRequest(tensor_names.of_optimizer(name, key), 0, value) for (name, key), value in numbers.items()
        )
        for name, needs in self._match.optimizer.items():
            master = self._run.adapter.master_shard(trained[name]).values
            kept = keys_of(optimizer, options[name], torch.empty(1, dtype=master.dtype, device=master.device))
            yield trained[name], StateSpec(kept.tensors, {key: numbers[name, key].item() for key in needs.numbers})

    def _require(self) -> None:
        """Check that the checkpoint has this rank's shards of what matches, in files that are there."""
        shards, trained = self._run.tensors.model_shards(), self._run.tensors.trained()
        wanted = {name: shards[name] for name in self._match.model}
        for name, needs in self._match.optimizer.items():
            place = self._run.adapter.master_shard(trained[name])
            wanted |= {tensor_names.of_optimizer(name, key): place for key in needs.tensors}
        if self._run.tensors.average is not None:
            self._run.tensors.average.require(self._tensors)
        for name, shard in wanted.items():
            begin = 0 if shard.group is None else shard.start
            self._tensors.require(name, shard.shape, begin, begin + shard.values.numel())

    @torch.no_grad()
    def fill(self) -> None:
        """Read this rank's shards into its memory."""
        shards, trained = self._run.tensors.model_shards(), self._run.tensors.trained()
        wanted = {name: shards[name] for name in self._match.model}
        for name, needs in self._match.optimizer.items():
            held = self._run.tensors.optimizer_shards_of(trained[name])
            wanted |= {tensor_names.of_optimizer(name, key): held[key] for key in needs.tensors if key in held}
        requests, strided = [], []
        for name, shard in wanted.items():
            values = shard.values.detach()
            flat = (
                values.view(-1)
                if values.is_contiguous()
                else torch.empty(values.numel(), dtype=values.dtype, device=values.device)
            )
            if not values.is_contiguous():
                strided.append((name, values, flat))
            requests.append(ReadRequest(name, 0 if shard.group is None else shard.start, flat))
        self._tensors.read(requests)
        if self._run.tensors.eight_bit is not None:
            self.converted = self._run.tensors.eight_bit.fill(set(self._match.optimizer), self._tensors)
        for name, values, flat in strided:
            values.copy_(flat.view(values.shape))
            if hash_of(values) != hash_of(flat):
                raise CheckpointError(
                    f"{name.removeprefix(tensor_names.PARAMETERS)}: has several elements in one place, but the "
                    "checkpoint has different values for them; give it memory of its own in the model, with .clone()"
                )

    def compare_bits(self) -> None:
        """Hash the restored tensors of all ranks, and compare with the manifest. Collective.

        Raises:
            CheckpointError: A tensor differs from what was saved.
        """
        recorded, device = self._manifest.tensors, self._run.adapter.device
        averages = {name: shard for name, shard in self._run.tensors.average_shards().items() if name in recorded}
        held = {
            name: shard
            for name, shard in (self._held() | averages).items()
            if recorded[name].dtype == name_of(shard.values.dtype)
        }
        wrong = [name for name, value in hashes(held, device).items() if hexadecimal(value) != recorded[name].hash]
        if wrong:
            raise CheckpointError(
                f"{self._folder}: {len(wrong)} of {len(held)} tensors differ from what was saved, such as {wrong[0]}; "
                "do not continue from this state"
            )

    def norms(self) -> dict[str, float]:
        """L2 norm of all parameters together, and of each kind of optimizer state that this rank knows completely.

        Collective.
        """
        held = self._held()
        counted = {name: shard for name, shard in held.items() if shard.values.is_floating_point()}
        squares: dict[str, float] = {}
        for name, norm in shard_norms(counted, self._run.adapter.device).items():
            state = tensor_names.optimizer_part(name)
            if state or tensor_names.parameter_of(name) not in self._manifest.buffers:
                kind = state[1] if state else "parameters"
                squares[kind] = squares.get(kind, 0.0) + norm**2
        # Moments of 8 bits are not among the shards.
        wanted = [(name, key) for name, needs in self._match.optimizer.items() for key in needs.tensors]
        unknown = {key for name, key in wanted if tensor_names.of_optimizer(name, key) not in held}
        return {kind: math.sqrt(square) for kind, square in squares.items() if kind not in unknown}

    def _held(self) -> dict[str, Shard]:
        """The restored shards, in the same order on all ranks; empty shards for tensors of which this rank holds
        nothing.
        """
        shards = self._run.tensors.model_shards()
        held = {name: shards[name] for name in self._match.model}
        for name, parameter in self._run.tensors.trained().items():
            needs = self._match.optimizer.get(name)
            if self._run.tensors.eight_bit is not None and self._run.tensors.eight_bit.is_8bit(parameter):
                continue  # compared when it was read
            place = self._run.adapter.master_shard(parameter)
            mine = self._run.tensors.optimizer_shards_of(parameter) if needs else {}
            for key in sorted(needs.tensors if needs else ()):
                if key in mine:
                    held[tensor_names.of_optimizer(name, key)] = mine[key]
                elif place.group is not None:
                    held[tensor_names.of_optimizer(name, key)] = place._replace(
                        values=place.values[:0].to(self.specs[parameter].tensors[key])
                    )
        return held


def _require_schedule(run: Run, manifest: Manifest) -> None:
    """Check that the schedule can resume where it would be resumed."""
    if run.accumulation is not None and manifest.optimizer is not None and manifest.schedule is not None:
        run.accumulation.schedule.require(manifest.schedule)


def _verify_files(folder: Path, manifest: Manifest, *, all_of_them: bool) -> None:
    """Check this rank's share of the files, or only the index."""
    names: Sequence[str] = sorted(manifest.files) if all_of_them else [metadata.FILE]
    problems = damaged(folder, manifest, names[dist.get_rank() :: dist.get_world_size()])
    if problems:
        raise CheckpointError(
            f"{folder}: {'; '.join(problems)}; load another checkpoint (unishard checkpoint list {folder.parent})"
        )
