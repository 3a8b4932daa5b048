"""Parameters, buffers, and the optimizer's state that is sharded as its parameters are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unishard.checkpoint import tensor_names
from unishard.checkpoint.hashing import hash_of, hashes, hexadecimal
from unishard.checkpoint.matching import Match, Wanted, fit
from unishard.checkpoint.tensor_reader import ReadRequest
from unishard.contract.optimizer_state import StateSpec, keys_of
from unishard.distributed.dtypes import name_of
from unishard.distributed.on_ranks import on_all
from unishard.distributed.shards import Shard, shard_norms
from unishard.distributed.storable import obstacle
from unishard.engine.state.part import CheckpointSource, Part, Saved, lazy
from unishard.engine.state.run import Run
from unishard.errors import CheckpointError


class ShardedTensors(Part):
    """Matched by name, shape and kind of optimizer state."""

    def __init__(self, run: Run, merged: Mapping[str, Tensor] | None) -> None:
        """Of a run.

        Args:
            run: The run.
            merged: To save: the buffers of all ranks together.
        """
        self._run, self._tensors = run, run.tensors
        self._merged = merged
        self._match = Match((), {}, ())
        self._specs: dict[nn.Parameter, StateSpec] = {}
        """The optimizer state to create before it is read."""

    def saved(self, group: dist.ProcessGroup) -> Saved:
        """As in `Part`: of the buffers, rank 0's are saved."""
        tensors, ties = self._run.tensors, self._run.tensors.ties()
        model, buffers = tensors.model_shards(self._merged), [*tensors.buffers()]
        if dist.get_rank():
            model = {name: shard for name, shard in model.items() if tensor_names.parameter_of(name) not in buffers}
        facts = {
            "frozen": [name for name, parameter in tensors.each() if not parameter.requires_grad],
            "buffers": [name for name in buffers if name not in ties],
        }
        return Saved(lazy(model | on_all(group, self._storable_state)), facts)

    def _storable_state(self) -> dict[str, Shard]:
        """The optimizer's state, all of which can be saved; what cannot of the model was refused by `prepare`."""
        shards = self._run.tensors.optimizer_shards()
        for name, shard in shards.items():
            problem = obstacle(shard.values)
            if problem is not None:
                raise CheckpointError(
                    f"{name} {problem}, which cannot be saved; choose another dtype or another optimizer"
                )
        return shards

    def check(self, source: CheckpointSource) -> None:
        """As in `Part`: names, shapes and kinds match, unless not `strict`, and this rank's shards are in the files."""
        shapes = {name: shard.shape for name, shard in self._tensors.model_shards().items() if shard.shape.numel()}
        self._match = fit(source.manifest, shapes, self._wanted(), strict=source.strict)
        self._specs = dict(self._specs_of(source))
        shards, trained = self._tensors.model_shards(), self._tensors.trained()
        wanted = {name: shards[name] for name in self._match.model}
        for name, needs in self._match.optimizer.items():
            place = self._run.adapter.master_shard(trained[name])
            wanted |= {tensor_names.of_optimizer(name, key): place for key in needs.tensors}
        for name, shard in wanted.items():
            source.tensors.require(name, shard.shape, shard.interval, shard.order)

    @torch.no_grad()
    def read(self, source: CheckpointSource) -> None:
        """As in `Part`."""
        if self._tensors.optimizer_state is not None:
            self._tensors.optimizer_state.make(self._specs)
        shards, trained = self._tensors.model_shards(), self._tensors.trained()
        wanted = {name: shards[name] for name in self._match.model}
        for name, needs in self._match.optimizer.items():
            held = self._tensors.optimizer_shards_of(trained[name])
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
            requests.append(ReadRequest(name, shard.interval.start, flat, shard.order))
        source.tensors.read(requests)
        for name, values, flat in strided:
            values.copy_(flat.view(values.shape))
            if hash_of(values) != hash_of(flat):
                raise CheckpointError(
                    f"{name.removeprefix(tensor_names.PARAMETERS)}: has several elements in one place, but the "
                    "checkpoint has different values for them; give it memory of its own in the model, with .clone()"
                )

    def resume(self, source: CheckpointSource, group: dist.ProcessGroup) -> Iterator[str]:
        """As in `Part`."""
        yield from self._match.notes
        saved = source.manifest.tensors
        dtypes = {
            name: name_of(shard.values.dtype) for name, shard in self._tensors.model_shards().items() if name in saved
        }
        cast = [name for name, dtype in dtypes.items() if saved[name].dtype != dtype]
        if cast:
            first, *_ = cast
            yield (
                f"{len(cast)} tensors of the model were {saved[first].dtype} and are {dtypes[first]} now, such as "
                f"{tensor_names.parameter_of(first)}"
            )

    def compare_bits(self, source: CheckpointSource) -> None:
        """Hash the restored tensors of all ranks, and compare with the manifest. Collective.

        Raises:
            CheckpointError: A tensor differs from what was saved.
        """
        recorded, device = source.manifest.tensors, self._run.adapter.device
        averages = {name: shard for name, shard in self._tensors.average_shards().items() if name in recorded}
        held = {
            name: shard
            for name, shard in (self._held() | averages).items()
            if recorded[name].dtype == name_of(shard.values.dtype)
        }
        wrong = [name for name, value in hashes(held, device).items() if hexadecimal(value) != recorded[name].hash]
        if wrong:
            raise CheckpointError(
                f"{source.folder}: {len(wrong)} of {len(held)} tensors differ from what was saved, such as "
                f"{wrong[0]}; do not continue from this state"
            )

    def norms(self, source: CheckpointSource) -> dict[str, float]:
        """L2 norm of all parameters together, and of each kind of optimizer state that this rank knows completely.

        Collective.
        """
        held = self._held()
        counted = {name: shard for name, shard in held.items() if shard.values.is_floating_point()}
        squares: dict[str, float] = {}
        for name, norm in shard_norms(counted, self._run.adapter.device).items():
            state = tensor_names.optimizer_part(name)
            if state or tensor_names.parameter_of(name) not in source.manifest.buffers:
                kind = state[1] if state else "parameters"
                squares[kind] = squares.get(kind, 0.0) + norm**2
        # Moments of 8 bits are not among the shards.
        wanted = [(name, key) for name, needs in self._match.optimizer.items() for key in needs.tensors]
        unknown = {key for name, key in wanted if tensor_names.of_optimizer(name, key) not in held}
        return {kind: math.sqrt(square) for kind, square in squares.items() if kind not in unknown}

    def _wanted(self) -> dict[str, Wanted]:
        """The optimizer state of each parameter."""
        wanted: dict[str, Wanted] = {}
        optimizer = self._run.torch_optimizer
        groups = [] if optimizer is None else optimizer.param_groups
        for names, group in zip(self._run.group_names if groups else (), groups, strict=True):
            template = keys_of(optimizer, group)
            needs = Wanted(frozenset(template.tensors), frozenset(template.numbers))
            wanted |= dict.fromkeys(names, needs)
        return wanted

    def _specs_of(self, source: CheckpointSource) -> Iterator[tuple[nn.Parameter, StateSpec]]:
        """Optimizer state with the numbers of the checkpoint and the dtypes of the current optimizer."""
        optimizer = self._run.torch_optimizer
        if optimizer is None:
            return
        trained = self._tensors.trained()
        groups = zip(self._run.group_names, optimizer.param_groups, strict=True)
        options = {name: group for names, group in groups for name in names}
        numbers = {
            (name, key): torch.zeros(1) for name, needs in self._match.optimizer.items() for key in needs.numbers
        }
        source.tensors.read(
            ReadRequest(tensor_names.of_optimizer(name, key), 0, value) for (name, key), value in numbers.items()
        )
        for name, needs in self._match.optimizer.items():
            master = self._run.adapter.master_shard(trained[name]).values
            kept = keys_of(optimizer, options[name], torch.empty(1, dtype=master.dtype, device=master.device))
            yield trained[name], StateSpec(kept.tensors, {key: numbers[name, key].item() for key in needs.numbers})

    def _held(self) -> dict[str, Shard]:
        """The restored shards, in the same order on all ranks; empty shards for tensors of which this rank holds
        nothing.
        """
        shards = self._tensors.model_shards()
        held = {name: shards[name] for name in self._match.model}
        for name, parameter in self._tensors.trained().items():
            needs = self._match.optimizer.get(name)
            if self._tensors.eight_bit is not None and self._tensors.eight_bit.is_8bit(parameter):
                continue  # compared when it was read
            place = self._run.adapter.master_shard(parameter)
            mine = self._tensors.optimizer_shards_of(parameter) if needs else {}
            for key in sorted(needs.tensors if needs else ()):
                if key in mine:
                    held[tensor_names.of_optimizer(name, key)] = mine[key]
                elif place.group is not None:
                    held[tensor_names.of_optimizer(name, key)] = place._replace(
                        values=place.values[:0].to(self._specs[parameter].tensors[key])
                    )
        return held
